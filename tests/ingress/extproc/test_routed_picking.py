"""What a ticket keeps while an answer is on its way."""

from nearkv.ingress.extproc.routed_picking import _without_bodies
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.keying import Job
from nearkv.ingress.planning import Plan
from nearkv.ingress.prefill_leg import read_fields
from nearkv.ingress.requests import parse_completion
from nearkv.ingress.routing import Decision, Rung
from nearkv.ingress.two_legs import Split
from nearkv.state.model import EngineInfo

BODY = b'{"model":"tiny","prompt":"a prompt of megabytes"}'
VIEW = EngineView(EngineInfo(id="e", incarnation="1", url="http://10.0.0.1:1"), agent="")


def job_of(body):
    return Job(
        web_request=None,
        path="/v1/completions",
        body=body,
        parsed=parse_completion(body),
        request_id="r",
        arrived_at=0.0,
        views=[VIEW],
        fields=read_fields(body),
    )


def split_plan():
    split = Split(
        source=VIEW,
        target=VIEW,
        fields=read_fields(BODY),
        source_cached_tokens=1,
        source_missing_tokens=2,
        reused_tokens=3,
        target_tokens=4,
    )
    return Plan(Decision("e", "pd", Rung.FRESH), split=split)


def test_prompts_are_let_go_and_what_the_books_need_stays():
    job = job_of(BODY)
    plan = _without_bodies(job, split_plan(), splits=True)
    kept = repr((job, plan))
    assert "megabytes" not in kept
    assert (job.parsed.model, job.request_id) == ("tiny", "r")
    assert (plan.split.source, plan.split.target_tokens) == (VIEW, 4)


def test_a_plan_whose_prefiller_cannot_be_named_is_one_for_the_engine_alone():
    plan = _without_bodies(job_of(BODY), split_plan(), splits=False)
    assert plan.split is None
    assert plan.decision.engine == "e"
