"""What a run says of its job before the first step. No torch.

The ranks and sizes (`config/describe.py`), the pipeline and its idle time (`stages.py`), and which optimizer, learning
rate and decay each role of parameters gets: a parameter in the wrong group trains without any error.
"""

from __future__ import annotations

from heptad.account.parameters import active
from heptad.config.describe import summary
from heptad.config.schema import Job
from heptad.models.resolve import derived
from heptad.models.spec import param_specs
from heptad.optim.roles import describe
from heptad.report.stages import pipeline_line


def opening(job: Job) -> str:
    """Lines for people; `job` is resolved. Of a class of the job's own the parameters are not known here."""
    figures, more = derived(job), pipeline_line(job)
    if job.model.experts is not None:
        figures["active_parameters"] = active(job.model)
    groups = [] if job.model.class_ is not None else describe(job.optimizer, param_specs(job.model))
    lines = [f"{'optimizer':18}{line}" for line in groups]
    return summary(job, figures, *([] if more is None else [more]), *lines)
