"""The part of the build that pyproject.toml cannot say: shm's optional compiled copier."""

import sysconfig

from setuptools import Extension, setup

# A free-threaded CPython has no limited API yet: it gets no compiled copier, and needs none.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "kvxfer.backends.shm._copy",
            ["kvxfer/backends/shm/_copy.c"],
            optional=True,  # without a compiler the package installs and works all the same
            py_limited_api=True,
        )
    ]
    if LIMITED_API
    else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED_API else {},
)
