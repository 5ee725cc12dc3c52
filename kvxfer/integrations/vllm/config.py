"""``kv_connector_extra_config``, checked: what a person writes to set the connector up."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import validators as v

from kvxfer.agent import AgentConfig
from kvxfer.agent.config import seconds_of
from kvxfer.core.control_config import ControlConfig, Security
from kvxfer.core.plugins import create_transport
from kvxfer.core.transport import Transport
from kvxfer.errors import ConfigError
from kvxfer.policies.timeouts import Timeouts

__all__ = ["ConnectorConfig"]


def _is(kind: type) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not right or value == "" or (isinstance(value, int) and value < 0):
            raise ConfigError(
                f"kv_connector_extra_config: {attribute.name} must be a {kind.__name__}, "
                f"not {value!r}"
            )

    return check


@attrs.frozen(kw_only=True)
class ConnectorConfig:
    """Settings of one vLLM instance; durations are seconds.

    Raises:
        ConfigError: names the key, what is expected, and the value.
    """

    backend: str = attrs.field(default="shm", validator=_is(str))
    """What moves the bytes: the name of an installed backend."""

    model: str | None = attrs.field(default=None, validator=v.optional(_is(str)))
    """Names the weights where the two sides load them from different paths. Default: vLLM's model
    name and revision, which then must be equal on both sides."""

    bind_host: str = ControlConfig().bind_host
    """Where the control channel listens, see ``ControlConfig``. Loopback by default."""
    advertise_host: str | None = None
    """Under which host peers reach it, where that is another; see ``ControlConfig``."""
    port_range: str | None = None
    """On which ports it may listen, such as ``"7000-7100"``; see ``ControlConfig``."""

    secret_key_file: str | None = attrs.field(default=None, validator=v.optional(_is(str)))
    """The file with our own key pair's secret half: see ``Security``."""
    allowed_keys: str | None = attrs.field(default=None, validator=v.optional(_is(str)))
    """Keys of the control channel, both or neither: see ``Security``. Needed beyond loopback."""

    insecure: bool = attrs.field(default=False, validator=_is(bool))
    """Listen beyond loopback without keys."""

    data_network_trusted: bool = attrs.field(default=False, validator=_is(bool))
    """See ``AgentConfig``: with keys, a backend whose own ports admit strangers needs it."""

    lease: float = AgentConfig().lease
    """How long prefill keeps a finished request's blocks for decode."""
    lease_margin: float = AgentConfig().lease_margin
    """How long after a lease's end prefill frees the blocks: see ``AgentConfig``."""

    connect_timeout: float = Timeouts().connect
    """``Timeouts.connect``."""
    queue_timeout: float = Timeouts().queue
    """``Timeouts.queue``."""
    transfer_timeout: float = Timeouts().transfer
    """``Timeouts.transfer``."""
    drain_timeout: float = Timeouts().drain
    """``Timeouts.drain``."""

    accept_timeout: float = 120.0
    """WRITE: how long decode waits for a push, from when it has blocks for it: the time that
    prefill needs, queue and computation together. Two minutes: a long prompt, a full queue."""

    write: bool = attrs.field(default=False, validator=_is(bool))
    """Take part in WRITE: prefill pushes layer by layer, decode lets its KV caches be written."""

    peers_from_request_ids: int = attrs.field(default=0, validator=_is(int))
    """WRITE for routers that name both peers in the request id (see ``router_ids``): the number of
    decode's ranks. 0: peers come from ``kv_transfer_params`` only."""

    share_caches: bool = attrs.field(default=False, validator=_is(bool))
    """``shm`` only: move the KV caches, which lie in heap memory on CPU, into memory that peers
    can map, when they are registered. WRITE over shm needs it at decode."""

    admit_readers: bool = attrs.field(default=False, validator=_is(bool))
    """``shm`` only: let other processes of this uid read the KV caches where Yama forbids it
    (``kernel.yama.ptrace_scope`` is 1). See ``ShmConfig.admit_readers``."""

    def __attrs_post_init__(self) -> None:
        # Whatever is wrong is said when the engine starts, by the scheduler as by the workers.
        _ = self.control, self.timeouts, self.agent("", "")
        seconds_of("accept_timeout", self.accept_timeout)
        for key in ("admit_readers", "share_caches"):
            if getattr(self, key) and self.backend != "shm":
                raise ConfigError(
                    f"kv_connector_extra_config: {key} is for the backend 'shm', not "
                    f"{self.backend!r}"
                )

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Read vLLM's ``kv_connector_extra_config``.

        Raises:
            ConfigError: a key is unknown (with the nearest known one), or a value is wrong.
        """
        known = [field.name for field in attrs.fields(cls)]
        for key in extra:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ConfigError(
                    f"kv_connector_extra_config has no key {key!r}",
                    next_step=f"{hint}Known keys: {', '.join(known)}",
                )
        return cls(**extra)

    @property
    def control(self) -> ControlConfig:
        return ControlConfig(
            bind_host=self.bind_host,
            advertise_host=self.advertise_host,
            port_range=self.port_range,
            security=self._security,
            insecure=self.insecure,
        )

    @property
    def _security(self) -> Security | None:
        if self.secret_key_file is None and self.allowed_keys is None:
            return None
        if self.secret_key_file is None or self.allowed_keys is None:
            missing = "secret_key_file" if self.secret_key_file is None else "allowed_keys"
            raise ConfigError(
                f"kv_connector_extra_config: {missing} is missing, the other half of the keys is "
                "there",
                next_step="give both, or neither",
            )
        return Security(secret_key_file=self.secret_key_file, allowed_keys=self.allowed_keys)

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(
            connect=self.connect_timeout,
            queue=self.queue_timeout,
            transfer=self.transfer_timeout,
            drain=self.drain_timeout,
        )

    def agent(self, name: str, fingerprint: str) -> AgentConfig:
        """The configuration of the agent of that name."""
        return AgentConfig(
            name=name,
            fingerprint=fingerprint,
            lease=self.lease,
            lease_margin=self.lease_margin,
            data_network_trusted=self.data_network_trusted,
        )

    def transport(self) -> Transport:
        """A new transport of the backend."""
        if self.backend != "shm":
            return create_transport(self.backend)
        from kvxfer.backends.shm import ShmConfig

        return create_transport("shm", config=ShmConfig(admit_readers=self.admit_readers))
