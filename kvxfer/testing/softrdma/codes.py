"""Numbers of the verbs interface, as ``<infiniband/verbs.h>`` gives them."""

from __future__ import annotations

import enum

__all__ = ["AsyncEvent", "SetupCall", "WcStatus"]


class WcStatus(enum.IntEnum):
    """How a work request ended (``enum ibv_wc_status``)."""

    SUCCESS = 0
    LOCAL_LENGTH = 1
    LOCAL_QP_OPERATION = 2
    LOCAL_EEC_OPERATION = 3
    LOCAL_PROTECTION = 4
    FLUSHED = 5
    MEMORY_WINDOW_BIND = 6
    BAD_RESPONSE = 7
    LOCAL_ACCESS = 8
    REMOTE_INVALID_REQUEST = 9
    REMOTE_ACCESS = 10
    REMOTE_OPERATION = 11
    RETRY_EXCEEDED = 12
    RNR_RETRY_EXCEEDED = 13
    LOCAL_RDD_VIOLATION = 14
    REMOTE_INVALID_RD_REQUEST = 15
    REMOTE_ABORTED = 16
    INVALID_EEC_NUMBER = 17
    INVALID_EEC_STATE = 18
    FATAL = 19
    RESPONSE_TIMEOUT = 20
    GENERAL = 21


class AsyncEvent(enum.IntEnum):
    """What a device reports on its own (``enum ibv_event_type``)."""

    CQ_ERROR = 0
    QP_FATAL = 1
    QP_REQUEST_ERROR = 2
    QP_ACCESS_ERROR = 3
    COMMUNICATION_ESTABLISHED = 4
    SQ_DRAINED = 5
    PATH_MIGRATED = 6
    PATH_MIGRATION_ERROR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERROR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    GID_CHANGE = 18


class SetupCall(enum.Enum):
    """Calls that can be made to fail; the value is the library's name for the fault."""

    ALLOCATE_PD = "pd_errno"
    REGISTER_MEMORY = "reg_errno"
    CREATE_CHANNEL = "channel_errno"
    CREATE_CQ = "cq_errno"
    CREATE_QP = "qp_errno"
    MODIFY_QP_INIT = "init_errno"
    MODIFY_QP_RTR = "rtr_errno"
    MODIFY_QP_RTS = "rts_errno"
