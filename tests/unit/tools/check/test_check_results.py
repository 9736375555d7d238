import msgspec

from medialane.tools.check import Answer, Case, CaseRequest, CheckReport, EndpointKind, encode
from medialane.tools.check.results import judge, weak_notes

KIND = EndpointKind("chat", "/chat", lambda _limits: ())
CASE = Case("image, an option", lambda: CaseRequest("/chat"), varies="one image")
REPORT = {"stage": "features", "transport": "shm", "items": [{"cache": "hit"}, {"cache": "miss"}]}


def good(text="a", logprob=-1.0, **options):
    return Answer(200, {"text": text, "logprob": logprob}, **options)


def refusal(status=400, message="no"):
    return Answer(status, {"error": {"message": message}})


def judged(ours, plain, *, varied=None, tolerance=0.0):
    return judge(KIND, CASE, ours, plain, varied=varied, tolerance=tolerance)


def test_equal_answers_are_equal_and_keep_how_they_were_served():
    result = judged(good(report=REPORT), good())
    assert (result.verdict, result.stage, result.transport, result.cache) == ("equal", "features", "shm", "mixed")


def test_other_text_differs_whatever_the_tolerance():
    result = judged(good("b"), good(), tolerance=9)
    assert result.verdict == "differs"
    assert "text: 'b' instead of 'a'" in result.detail


def test_other_numbers_are_close_within_the_tolerance_only():
    assert judged(good(logprob=-1.25), good()).verdict == "differs"
    result = judged(good(logprob=-1.25), good(), tolerance=0.5)
    assert (result.verdict, result.largest_difference) == ("close", 0.25)


def test_both_must_refuse_with_the_same_status():
    same = judged(refusal(message="ours"), refusal(message="theirs"))
    assert (same.verdict, same.detail) == ("refused", "400: theirs; medialane: ours")
    assert judged(refusal(400), refusal(500)).verdict == "refused"
    assert judged(refusal(400), Answer(0, "no response")).verdict == "refused"
    assert judged(refusal(503), refusal(500)).verdict == "refused"
    for ours, plain in ((refusal(500), refusal(400)), (refusal(), good()), (refusal(404), refusal(400))):
        assert judged(ours, plain).verdict == "differs"


def test_medialane_may_answer_what_plain_vllm_refuses_or_fails_at():
    for plain in (refusal(400), refusal(500), Answer(0, "no response")):
        assert judged(good(), plain).verdict == "answered"


def test_no_response_differs():
    assert judged(Answer(0, "no response"), good()).verdict == "differs"


def test_option_without_effect_in_plain_vllm_may_be_refused_and_one_with_effect_may_not():
    assert judged(refusal(), good(), varied=good()).verdict == "skipped"
    assert judged(refusal(), good(), varied=good("other")).verdict == "differs"
    assert judged(refusal(500), good(), varied=good()).verdict == "differs"
    assert judged(good("b"), good(), varied=good()).verdict == "differs"


def test_answers_that_do_not_depend_on_the_media_are_noted():
    case = Case("another image", CASE.make, varies="one image")
    results = [judge(KIND, case, good(), good(), varied=varied, tolerance=0) for varied in (good(), good("other"))]
    assert len(list(weak_notes(results[:1]))) == 1
    assert not list(weak_notes(results[1:]))


def report_of(*results):
    return CheckReport("m", "1", "2", ("--flag",), ("chat",), {"image": 2}, results)


def test_report_passes_unless_a_case_differs_or_there_is_none():
    equal, differs = judged(good(), good()), judged(good("b"), good())
    assert report_of(equal).passed
    assert not report_of(equal, differs).passed
    assert not report_of().passed


def test_report_of_refusals_alone_does_not_pass():
    refused = judged(refusal(), refusal())
    assert not report_of(refused).passed
    assert report_of(refused, judged(good(), good())).passed


def test_report_counts_stages_and_survives_json():
    report = report_of(judged(good(report=REPORT), good()), judged(refusal(), refusal()))
    assert report.stages == {"features (shm)": 1}
    assert msgspec.json.decode(encode(report), type=CheckReport) == report


def test_report_counts_what_became_of_embeddings():
    items = [{"cache": "hit", "embedding": outcome} for outcome in ("loaded", "encoded", "loaded")]
    one, both = ({"stage": "features", "items": found} for found in (items[:1], items))
    report = report_of(*(judged(good(report=found), good()) for found in (one, both, REPORT)))
    assert report.embeddings == {"loaded": 2, "encoded": 1}


def split(num_tokens):
    return judged(good(report={"prefill": {"outcome": "split", "transferred_tokens": num_tokens}}), good())


def test_report_passes_only_if_each_prompt_that_was_split_was_read():
    whole = judged(good(report={"prefill": {"outcome": "few_tokens"}}), good())
    assert report_of(split(100), whole).passed
    assert not report_of(split(100), split(0)).passed
    assert not report_of(whole).passed, "none was split"
