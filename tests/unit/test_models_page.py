"""docs/models.md as it is made from reports of `medialane check`."""

import json

import models_page
import msgspec

from medialane.tools.check import CaseResult, CheckReport


def report(folder, *verdicts, outcomes=("encoded",), **options):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["TinyForConditionalGeneration"]}))
    results = tuple(
        CaseResult(
            "chat", f"case {n}", verdict, 200, 200, detail="why", stage="features", transport="shm", embeddings=outcomes
        )
        for n, verdict in enumerate(verdicts)
    )
    return CheckReport(str(folder), "1.0", "0.32.0", (), ("chat",), {"image": 2}, results, **options)


def test_row_of_a_family_counts_its_cases(tmp_path):
    rows = {"tiny": models_page.row_of(report(tmp_path, "equal", "close", "equal", "refused", "skipped"))}
    line = "| tiny | Tiny | image (2) | chat | features | kept | 3 | 1 | 1 skipped |"
    assert line in models_page.page(rows).splitlines()
    assert "medialane 1.0 and vLLM 0.32.0" in models_page.page(rows)


def test_differences_and_notes_are_listed_but_for_modalities_that_the_model_has_not(tmp_path):
    notes = ("no audio: plain vLLM answers 400", "medialane logged: stage decoded, not features: why")
    rows = {"tiny": models_page.row_of(report(tmp_path, "equal", "differs", notes=notes))}
    page = models_page.page(rows)
    assert "* **tiny**: case 1: why" in page
    assert "* **tiny**: medialane logged: stage decoded" in page
    assert "no audio" not in page


def test_row_says_whether_embeddings_are_kept_and_why_not(tmp_path):
    why = "the model has an encoder prompt"
    rows = {"not": models_page.row_of(report(tmp_path, "equal", outcomes=(), no_embeddings=why))}
    rows["unknown"] = models_page.row_of(report(tmp_path, "equal", outcomes=("unkept",)))
    page = models_page.page(rows)
    assert "| features | not kept | 1 |" in page
    assert f"* **not**: embeddings are not kept: {why}" in page
    assert "| features |  | 1 |" in page


def test_row_names_modalities_whose_prompts_follow_from_the_processed_items(tmp_path):
    limits = {"image": 2, "audio": 1}
    stages = {(): " (by items: image, audio)", ("image",): " (by items: audio)", ("audio", "image"): "", None: ""}
    for predicted, items in stages.items():
        made = msgspec.structs.replace(report(tmp_path, "equal"), limits=limits, predicted=predicted)
        assert f"| features{items} | kept |" in models_page.page({"tiny": models_page.row_of(made)})
