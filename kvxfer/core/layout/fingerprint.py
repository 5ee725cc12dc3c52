"""``Fingerprint``: is the peer running the same model? Geometry alone cannot tell."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from kvxfer.core.layout import _wire
from kvxfer.core.layout._checks import MAX_NAME, is_name
from kvxfer.errors import GeometryError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvxfer.core.layout.layers import LayerRef

__all__ = ["Fingerprint", "geometry_digest"]


def _sorted_names(values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise InvalidInputError(f"attention_backends must be names, not the string {values!r}")
    return tuple(sorted(set(values)))


@attrs.frozen(kw_only=True)
class Fingerprint:
    """What must be equal on both sides for the bytes to mean the same.

    Attributes:
        model: name and revision of the weights, as the operator writes them.
        dtype: of the model.
        kv_dtype: of the cache, "auto" resolved.
        kv_quantization: scheme and whatever scales depend on; "" for none.
        attention_backends: names, in any order; empty if layouts do not depend on them.
    """

    model: str = attrs.field(validator=is_name)
    dtype: str = attrs.field(validator=is_name)
    kv_dtype: str = attrs.field(validator=is_name)
    kv_quantization: str = attrs.field(
        default="", validator=v.and_(v.instance_of(str), v.max_len(MAX_NAME))
    )
    attention_backends: tuple[str, ...] = attrs.field(
        default=(),
        converter=_sorted_names,
        validator=v.and_(v.max_len(64), v.deep_iterable(is_name)),
    )

    @property
    def digest(self) -> str:
        """64 hexadecimal digits, equal for equal fingerprints."""
        return _digest(self.to_wire())

    def require(self, peer: Fingerprint) -> None:
        """Refuse a peer whose bytes would mean something else.

        Raises:
            GeometryError: naming every field that differs, with both values.
        """
        unlike = [
            f"{field.name} {getattr(self, field.name)!r} here and {getattr(peer, field.name)!r}"
            for field in attrs.fields(Fingerprint)
            if getattr(self, field.name) != getattr(peer, field.name)
        ]
        if unlike:
            raise GeometryError(
                f"the peer runs another model: {'; '.join(unlike)} there",
                next_step="equal geometry of another model would be silent garbage: align the "
                "deployments",
            )

    def to_wire(self) -> dict[str, Any]:
        """A dict of builtins, for the handshake."""
        out = attrs.asdict(self)
        out["attention_backends"] = list(self.attention_backends)
        return out

    @classmethod
    def from_wire(cls, message: Any) -> Fingerprint:
        """What ``to_wire`` made, from a peer that is not trusted.

        Raises:
            InvalidInputError: a key is missing, unknown, or of the wrong type or range.
        """
        fields = _wire.fields(
            "fingerprint",
            message,
            {
                "model": str,
                "dtype": str,
                "kv_dtype": str,
                "kv_quantization": str,
                "attention_backends": list,
            },
        )
        names = fields["attention_backends"]
        if len(names) > 64 or not all(type(entry) is str for entry in names):
            raise InvalidInputError("fingerprint.attention_backends must be at most 64 strings")
        return cls(**fields)


def geometry_digest(layers: Sequence[LayerRef]) -> str:
    """64 hexadecimal digits over names, groups and layouts, token order included.

    Two sides with equal digests hold equal caches.  Unequal ones may still map onto each other:
    ``match_layers`` finds out.
    """
    return _digest([layer.to_wire() for layer in sorted(layers, key=lambda layer: layer.name)])


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
