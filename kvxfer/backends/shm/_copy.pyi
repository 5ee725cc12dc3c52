from kvxfer.core.batch import Int64Array

REVISION: int

def copy(target: Int64Array, source: Int64Array, size: Int64Array, /) -> None: ...
