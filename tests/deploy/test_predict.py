"""A run directory is a model: it loads, predicts from files and frames, and answers the same in every form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

import kronecell as kc
from kronecell.cli.main import main
from kronecell.data import Store, decode, make_folds
from kronecell.training.evaluation import evaluate_clips, held_out
from kronecell.training.run import run, run_folder
from tests.training_cases import make_store, tiny

pytest.importorskip("av")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Store]]:
    """A run of one epoch on 44 clips."""
    root = tmp_path_factory.mktemp("trained")
    store = make_store(root)
    experiment = tiny(epochs=1, pixel_mean=0.3, input_gain=3.0)
    run(experiment, store, root / "runs", show=False)
    yield run_folder(root / "runs", experiment, 0, 0), store


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_a_run_loads_with_names_and_predicts_what_its_forward_says(trained: tuple[Path, Store]) -> None:
    folder, store = trained
    model = kc.load(folder)
    assert isinstance(model, kc.VideoClassifier) and model.class_names == store.classes and not model.training
    clip = store.clips[0]
    answer = model.predict(clip.path)
    assert sum(answer.chances) == pytest.approx(1, abs=1e-5) and answer.label in store.classes
    # What validation would see: every segment's frames, the mean of the softmax.
    from kronecell.data import validation_frames

    numbers = validation_frames(store.num_frames(0))
    x = torch.from_numpy(np.stack([store.frames(0)[row] for row in numbers])).reshape(10, 6, -1)
    with torch.no_grad():
        expected = model(x).softmax(-1).mean(0)
    torch.testing.assert_close(torch.tensor(answer.chances), expected, rtol=1e-6, atol=1e-7)


def test_a_path_and_the_frames_of_it_get_the_same_answer(trained: tuple[Path, Store], tmp_path: Path) -> None:
    folder, store = trained
    model = kc.load(folder)
    path = store.clips[3].path
    frames = decode(path, 32, 24).frames
    np.save(tmp_path / "clip.npy", frames)
    same = [frames, torch.from_numpy(frames), frames / np.float64(255), tmp_path / "clip.npy", frames.reshape(12, -1)]
    expected = model.predict(path)
    for answer in model.predict(same):
        assert answer.chances == expected.chances
    assert model.predict([]) == []


def test_saved_and_loaded_elsewhere_it_answers_the_same(trained: tuple[Path, Store], tmp_path: Path) -> None:
    folder, store = trained
    model = kc.load(folder)
    kc.save(model, tmp_path / "deployed")
    again = kc.load(tmp_path / "deployed").eval()
    path = store.clips[5].path
    assert again.predict(path) == model.predict(path)
    assert (again.class_names, again.preprocessing, again.facts) == (
        model.class_names,
        model.preprocessing,
        model.facts,
    )
    filled = tiny(pixel_mean=0.3, input_gain=3.0).build_model(11)
    assert torch.equal(kc.load(folder, into=filled).classifier.weight, model.classifier.weight)


def test_a_run_of_the_first_release_takes_its_names_from_the_store(
    trained: tuple[Path, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = trained
    expected = kc.load(folder).predict(store.clips[0].path)
    beside = tmp_path / "beside" / "runs" / "tiny" / "fold0-seed0"
    shutil.copytree(folder, beside)
    (beside / "model.json").unlink()
    text = (beside / "config.toml").read_text()
    (beside / "config.toml").write_text("\n".join(line for line in text.splitlines() if "channels" not in line))
    model = kc.load(beside)
    assert not model.named and model.predict(store.clips[0].path).chances == expected.chances
    shutil.copytree(store.root, tmp_path / "beside" / "store")  # found by its content
    assert kc.load(beside).predict(store.clips[0].path).label == expected.label
    shutil.rmtree(tmp_path / "beside" / "store")
    _, out, err = call(capsys, "predict", beside, store.clips[0].path, "--data", store.root, "--json")
    assert json.loads(out)["predictions"][0]["class"] == expected.label and err == ""


def test_predict_names_what_it_cannot_read_and_answers_the_rest(
    trained: tuple[Path, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = trained
    broken = tmp_path / "broken.avi"
    broken.write_bytes(b"no video")
    code, out, err = call(capsys, "predict", folder, broken, store.clips[0].path, "--json")
    facts = json.loads(out)
    assert code == 1 and len(facts["predictions"]) == 1 and "broken.avi" in facts["unreadable"][0]["error"]
    assert "broken.avi" in err
    code, out, _ = call(capsys, "predict", folder, store.clips[0].path.parent, "--top", "1")  # a folder of clips
    assert code == 0 and out.count(".avi") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("predict", "nowhere", "x.avi"), "no model at nowhere"),
        (("predict", "STORE", "x.avi"), "is a store of clips, not a model"),
        (("predict", "RUN", "nothing.avi"), "does not exist"),
        (("evaluate", "RUN", "--clips", "some"), "--clips must be one of"),
        (("evaluate", "RUN", "--plot", "x.gif"), "expected a file ending in .png"),
        (("export", "RUN", "--to", "coreml"), "--to must be one of onnx"),
        (("bench", "nothing"), "neither a folder with a model nor a format"),
        (("bench", "RUN", "--batches", "0"), "--batches must be numbers"),
    ],
)
def test_mistakes_are_one_line(
    trained: tuple[Path, Store], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    folder, store = trained
    words = [{"RUN": str(folder), "STORE": str(store.root)}.get(word, word) for word in arguments]
    code, out, err = call(capsys, *words)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_evaluate_agrees_with_training_and_counts_every_clip(
    trained: tuple[Path, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = trained
    result = json.loads((folder / "result.json").read_text())
    picture = tmp_path / "confusion.png"
    code, out, _ = call(capsys, "evaluate", folder, "--data", store.root, "--json", "--plot", picture)
    facts = json.loads(out)
    assert code == 0 and facts["held_out"] and facts["accuracy"] == pytest.approx(result["top1"])
    confusion = np.array(facts["confusion"])
    assert confusion.sum() == facts["clips"] == 22 and np.trace(confusion) == round(22 * facts["accuracy"])
    assert facts["interval"][0] <= facts["accuracy"] <= facts["interval"][1]
    folds = make_folds(store.clips, k=2)  # those of the experiment, not the store's five
    assert {a["name"] for a in facts["answers"]} == {store.clips[i].name for i, f in enumerate(folds) if f == 0}
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, _ = call(capsys, "evaluate", folder, "--confusion", "--wrong", "--data", store.root, "--clips", "all")
    assert code == 0 and "on 44 clips" in out and "trained on" in out and "is \\ answered" in out


def test_evaluate_refuses_classes_that_the_model_does_not_know(trained: tuple[Path, Store], tmp_path: Path) -> None:
    folder, store = trained
    model = kc.load(folder)
    model.class_names = tuple(f"other {name}" for name in model.class_names)
    with pytest.raises(kc.DataError, match="does not know the class"):
        evaluate_clips(model, store)
    model.facts["manifest_hash"] = "another"
    assert held_out(model, store) is None


def test_the_onnx_file_gives_the_answer_of_predict(
    trained: tuple[Path, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    folder, store = trained
    target = tmp_path / "model.onnx"
    code, out, err = call(capsys, "export", folder, "--to", "onnx", "--out", target, "--json")
    assert code == 0, err[-600:]
    assert json.loads(out)["largest_relative_difference"] < 1e-5 and err == ""
    about = json.loads((tmp_path / "model.onnx.json").read_text())
    from kronecell.training.predict import read_segments

    answer = kc.load(folder).predict(store.clips[7].path)
    segments, _, _ = read_segments(store.clips[7].path, kc.Preprocessing(32, 24))
    session = runtime.InferenceSession(target)
    (scores,) = session.run(None, {session.get_inputs()[0].name: segments.numpy()})
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    chances = (chances / chances.sum(-1, keepdims=True)).mean(0)
    np.testing.assert_allclose(chances, answer.chances, rtol=1e-5, atol=1e-6)
    assert about["classes"][int(chances.argmax())] == answer.label


def test_a_run_is_compressed_and_the_result_is_a_classifier(
    trained: tuple[Path, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, store = trained
    dense = tiny(name="dense", epochs=1, format="dense")
    run(dense, store, tmp_path / "runs", show=False)
    source, out = run_folder(tmp_path / "runs", dense, 0, 0), tmp_path / "small"
    code, text, _ = call(capsys, "compress", source, out, "--rule", "rnn=tt:r=4", "--json")
    assert code == 0 and json.loads(text)["totals"]["model_params_before"] > 100_000
    small = kc.load(out)
    assert small.class_names == store.classes and sum(p.numel() for p in small.parameters()) < 10_000
    assert call(capsys, "predict", out, store.clips[0].path)[0] == 0
    code, text, _ = call(capsys, "evaluate", out, "--data", store.root, "--json")
    assert code == 0 and json.loads(text)["held_out"]
    # What is compressed already is left alone, here the input matrix.
    code, text, _ = call(capsys, "compress", out, tmp_path / "smaller", "--budget", "0.9", "--json")
    layers = {layer["name"] for layer in json.loads(text)["layers"]}
    assert code == 0 and "classifier.weight" in layers and "rnn.weight_ih_l0" not in layers
    code, text, _ = call(capsys, "inspect", out, "--json")
    stored = [entry for entry in json.loads(text)["matrices"] if entry["kind"] == "compressed"]
    assert [entry["name"] for entry in stored] == ["rnn.weight_ih_l0"] and prod(stored[0]["shape"]) == 64 * 2304


def test_bench_times_ours_beside_dense(trained: tuple[Path, Store], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "bench", trained[0], "--batches", "1,2", "--json")
    facts = json.loads(out)
    assert code == 0 and [row["batch"] for row in facts["times"]] == [1, 2]
    assert facts["dense_parameters"] > 10 * facts["parameters"]
    assert all(row["times_faster"] == pytest.approx(row["dense_ms"] / row["ms"]) for row in facts["times"])


@pytest.mark.slow
def test_doctor_finds_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert code == 0 and all(check["error"] is None for check in facts["checks"]) and len(facts["checks"]) >= 2


def test_a_run_is_quantized_and_answers_nearly_the_same(
    trained: tuple[Path, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = trained
    code, out, _ = call(capsys, "quantize", folder, tmp_path / "small", "--bits", "8", "--json")
    assert code == 0 and json.loads(out)["matrices"]
    clip = store.clips[0].path
    expected, answer = kc.load(folder).predict(clip), kc.load(tmp_path / "small").predict(clip)
    np.testing.assert_allclose(answer.chances, expected.chances, atol=0.01)
    assert answer.classes == store.classes
    code, _, err = call(capsys, "quantize", folder, tmp_path / "other", "--bits", "9")
    assert code == 2 and "bits" in err and err.count("\n") == 1
