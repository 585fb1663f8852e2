"""Copies one job, with the checks before and after that keep bytes of one chunk out of the slot of another."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .copier import Copier
from .copy_window import WindowCopier
from .jobs import STORE, Job
from .pieces import Plan
from .shared import Mapping, fence, shared


@dataclass(slots=True, eq=False)
class Task:
    """A job from its arrival to its end. `event`: point of the model's work that the copy waits for."""

    job: Job
    plan: Plan | None
    event: object = None
    queued_at: float = field(default_factory=time.monotonic)


def copy_job(task: Task, mapping: Mapping | None, copier: Copier, window: WindowCopier | None) -> str:
    """Copies the job's bytes. Uses the window if there is one.

    Returns "" if all bytes arrived. Otherwise returns the name of the event to count, and no copy of the job is in
    flight.
    """
    job, plan, event = task.job, task.plan, task.event
    if plan is None or mapping is None or mapping.region != job.region:
        return f"{job.kind}_failed/region"
    slots, generations = plan.refs.slots, plan.refs.generations
    if not mapping.inside(slots, plan.refs.lengths):
        return f"{job.kind}_failed/bounds"
    if job.kind == STORE:
        owner = shared().lock_number
        if owner is None or not mapping.granted_to(owner, slots, generations):
            return "store_dropped/not_granted"
    elif not mapping.same_generation(slots, generations):
        return "load_failed/generation"
    if window is None:
        mapping.populate(slots, plan.refs.lengths)
        copier.copy(job.kind, plan.pieces, event)
    elif refusal := window.copy(job.kind, plan, event):
        return f"{job.kind}_failed/window/{refusal}"
    fence()
    if job.kind != STORE and not mapping.same_generation(slots, generations):
        return "load_failed/generation"
    return ""
