"""The executor: untrusted programs in processes of their own, judged from outside (phases 3 and 4)."""

from .jobs import Job, Limits, Status, Verdict
from .pool import Sandbox


__all__ = ["Job", "Limits", "Sandbox", "Status", "Verdict"]
