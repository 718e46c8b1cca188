"""Records on disk: what was written is read back bit for bit, and what strangers write is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from strategies import cases
from synthetic import CUTS, STRATEGY, record_of

from equivtests.cases.case import Case, Layout, Model
from equivtests.chapters.records import read_record, write_record
from equivtests.errors import RecordError
from equivtests.judge.judge import judge
from equivtests.record.observation import Observation, Place, Record
from equivtests.reference.expectation import expect

CASE = Case("stored", Model("linear"), ((((3, 2),), ((1,),)), (((1,),), ((4,),))), Layout(2))


def same(a: Record, b: Record) -> bool:
    """Equal in everything, arrays bit for bit."""

    def plain(record: Record) -> list[Any]:
        arrays = [(o.array.dtype, o.array.shape, o.array.tobytes()) for o in record.observations]
        return [arrays, [dataclasses.replace(o, array=np.zeros(())) for o in record.observations]]

    return (a.world, a.device) == (b.world, b.device) and plain(a) == plain(b)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.sampled_from(CUTS))
def test_a_record_is_read_back_as_it_was_written(tmp_path: Path, case: Case, cut: Any) -> None:
    record = record_of(case, cut)
    write_record(tmp_path, case, STRATEGY, record)
    found_case, strategy, found = read_record(tmp_path)
    assert (found_case, strategy) == (case, STRATEGY) and same(found, record)


PLACES = {
    "whole": (Place((2, 3), replica=1), (2, 3)),
    "number": (Place(()), ()),
    "box": (Place((4, 3), box=((1, 3), (0, 3))), (2, 3)),
    "empty box": (Place((4, 3), box=((4, 4), (0, 3))), (0, 3)),
    "interval": (Place((4, 3), interval=(2, 7)), (5,)),
    "partial sum": (Place((2,), partial="sum"), (2,)),
    "partial mean": (Place((), partial="mean"), ()),
}
DTYPES = {"float32": "float32", "float64": "float64", "int64": "int64", "float16": "float16", "bfloat16": "uint16"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", PLACES)
def test_every_place_and_dtype_survives(tmp_path: Path, where: str, dtype: str) -> None:
    place, shape = PLACES[where]
    array = (np.arange(np.prod(shape)) + 0x3F80).astype(DTYPES[dtype]).reshape(shape)
    shown = Observation("weight", "w", 1, 2, 3, place, dtype, array)
    record = Record(2, "cuda", [shown])
    write_record(tmp_path / "made" / "for it", CASE, STRATEGY, record)
    found = read_record(tmp_path / "made" / "for it")[2]
    assert same(found, record)
    assert np.array_equal(found.observations[0].values(), shown.values())


def test_arrays_that_are_not_contiguous_survive(tmp_path: Path) -> None:
    array = np.arange(12.0).reshape(3, 4).T
    record = Record(2, "cpu", [Observation("weight", "w", 0, 0, None, Place((4, 3)), "float64", array)])
    write_record(tmp_path, CASE, STRATEGY, record)
    assert np.array_equal(read_record(tmp_path)[2].observations[0].array, array)


def test_not_a_number_survives(tmp_path: Path) -> None:
    array = np.array([np.nan, np.inf, -0.0, 2.0**-149], dtype=np.float32)
    record = Record(2, "cpu", [Observation("gradient", "g", 0, 0, None, Place((4,)), "float32", array)])
    write_record(tmp_path, CASE, STRATEGY, record)
    assert same(read_record(tmp_path)[2], record)


def test_a_record_that_was_read_is_judged_like_the_one_that_was_written(tmp_path: Path) -> None:
    record = record_of(CASE, "flat")
    write_record(tmp_path, CASE, STRATEGY, record)
    case, strategy, found = read_record(tmp_path)
    expectation = expect(case, case.semantics)
    assert judge(case, strategy, found, expectation) == judge(CASE, STRATEGY, record, expectation)


# ------------------------------------------------------------------------------------ what strangers write


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A fault that changes the JSON data of `record.json`."""

    def apply(directory: Path) -> None:
        path = directory / "record.json"
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return apply


def entry(**changes: Any) -> Callable[[Path], None]:
    """A fault in the first entry (the weights entering the first update)."""
    return edit(lambda data: data["entries"][0].update(changes))


def placed(**changes: Any) -> Callable[[Path], None]:
    return edit(lambda data: data["entries"][0]["place"].update(changes))


def replaced(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_bytes(content)


def directory_for_record(directory: Path) -> None:
    (directory / "record.json").unlink()
    (directory / "record.json").mkdir()


def truncated(name: str, keep: float) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[: int(len(content) * keep)])

    return apply


def rewritten(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    """A fault in the first array of rank 0."""

    def apply(directory: Path) -> None:
        arrays = load_file(directory / "rank-0.safetensors")
        save_file({**arrays, "0": change(arrays["0"])}, directory / "rank-0.safetensors")

    return apply


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no record.json": (lambda d: (d / "record.json").unlink(), "record.json cannot be read"),
    "a directory for record.json": (directory_for_record, "record.json cannot be read"),
    "a rank's file missing": (lambda d: (d / "rank-1.safetensors").unlink(), "rank-1.safetensors is missing"),
    "empty record.json": (replaced("record.json", b""), "record.json: Expecting value"),
    "half of record.json": (truncated("record.json", 0.5), "record.json: "),
    "record.json not in UTF-8": (replaced("record.json", b"\xff\xfe{}"), "record.json: 'utf-8' codec"),
    "deep record.json": (replaced("record.json", b"[" * 100_000), "record.json: maximum recursion depth"),
    "a list": (replaced("record.json", b"[]"), "record.json: expected an object, got []"),
    "unknown field": (edit(lambda data: data.update(x=1)), "record.json: unknown field 'x'"),
    "missing field": (edit(lambda data: data.pop("strategy")), "record.json: field 'strategy' is missing"),
    "another format": (edit(lambda data: data.update(format=2)), "format 2; this version reads 1"),
    "another world": (edit(lambda data: data.update(world=3)), "world 3, but the case has 2 ranks"),
    "a case that is not valid": (
        edit(lambda data: data["case"].update(accumulation=0)),
        "accumulation must be at least 1",
    ),
    "an unknown algorithm": (edit(lambda data: data["strategy"].update(algorithm="magic")), "'magic'"),
    "an unknown device": (edit(lambda data: data.update(device="abacus")), "record.json.device: expected one of"),
    "unknown kind": (entry(kind="wieght"), "entries[0] (wieght linear.weight of rank 0): unknown kind"),
    "rank out of range": (entry(rank=7), "no array 0 in rank-7.safetensors"),
    "negative rank": (entry(rank=-1), "no array 0 in rank--1.safetensors"),
    "rank of another file": (entry(rank=1), "no array 0 in rank-1.safetensors"),
    "negative update": (entry(update=-1), "update -1, but the case has 2"),
    "update out of range": (entry(update=3), "update 3, but the case has 2"),
    "update as text": (entry(update="0"), 'record.json.entries[0].update: expected int, got "0"'),
    "wrong dtype tag": (entry(dtype="float64"), "array of float32, but the entry says float64"),
    "bfloat16 tag on floats": (entry(dtype="bfloat16"), "array of float32, but the entry says bfloat16"),
    "wrong size": (placed(shape=[3, 4]), "array of 15 elements at a place of 12"),
    "box out of the shape": (placed(box=[[0, 3], [1, 6]]), "box [(0, 3), (1, 6)] does not lie in the shape (3, 5)"),
    "box with another rank": (placed(box=[[0, 15]]), "box [(0, 15)] does not lie in the shape (3, 5)"),
    "negative box": (placed(box=[[-3, 0], [0, 5]]), "box [(-3, 0), (0, 5)] does not lie in the shape (3, 5)"),
    "backward box": (placed(box=[[3, 0], [5, 0]]), "box [(3, 0), (5, 0)] does not lie in the shape (3, 5)"),
    "interval out of the shape": (placed(interval=[1, 16]), "interval (1, 16) does not lie in the shape (3, 5)"),
    "negative interval": (placed(interval=[-15, 0]), "interval (-15, 0) does not lie in the shape (3, 5)"),
    "negative shape": (placed(shape=[-3, -5]), "shape (-3, -5) has a negative size"),
    "a triple for a pair": (placed(interval=[0, 1, 2]), "place.interval: expected 2 items"),
    "an unknown combination": (placed(partial="max"), "place.partial: expected one of"),
    "truncated arrays": (truncated("rank-0.safetensors", 0.9), "rank-0.safetensors is not a safetensors file"),
    "no header": (truncated("rank-0.safetensors", 0.0), "rank-0.safetensors is not a safetensors file"),
    "text for arrays": (replaced("rank-0.safetensors", b"weights"), "rank-0.safetensors is not a safetensors file"),
    "a huge header": (replaced("rank-0.safetensors", b"\xff" * 64), "rank-0.safetensors is not a safetensors file"),
    "an array lost": (
        lambda d: save_file({"1": np.zeros(2)}, d / "rank-0.safetensors"),
        "entries[0] (weight linear.weight of rank 0): no array 0 in rank-0.safetensors",
    ),
    "an array too short": (rewritten(lambda a: a.reshape(-1)[:-1].copy()), "array of 14 elements at a place of 15"),
    "an array of other type": (rewritten(lambda a: a.astype(np.int32)), "array of int32, but the entry says float32"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_directory_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    write_record(tmp_path, CASE, STRATEGY, record_of(CASE))
    fault, message = BAD[name]
    fault(tmp_path)
    with pytest.raises(RecordError) as caught:
        read_record(tmp_path)
    assert message in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere", "file", "file/below"])
def test_a_path_that_is_no_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(RecordError, match="record.json cannot be read: a record directory holds record.json"):
        read_record(tmp_path / name)


class Bomb:
    """Executes code where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["record.json", "rank-0.safetensors"])
def test_nothing_that_is_read_is_executed(tmp_path: Path, name: str) -> None:
    mark, payload = tmp_path / "executed", pickle.dumps(Bomb(tmp_path / "executed"))
    pickle.loads(payload)
    assert mark.exists()
    mark.unlink()
    write_record(tmp_path, CASE, STRATEGY, record_of(CASE))
    (tmp_path / name).write_bytes(payload)
    with pytest.raises(RecordError):
        read_record(tmp_path)
    assert not mark.exists()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_either_refused_or_judged(tmp_path: Path, data: st.DataObject) -> None:
    """A few bytes of a file overwritten: RecordError or a verdict, never another exception."""
    write_record(tmp_path, CASE, STRATEGY, record_of(CASE, "flat"))
    path = tmp_path / data.draw(st.sampled_from(["record.json", "rank-0.safetensors", "rank-1.safetensors"]))
    content = bytearray(path.read_bytes())
    likely = st.sampled_from(b'0123456789-"ael[]{},\x00\xff')
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(likely)
    path.write_bytes(content)
    try:
        case, strategy, record = read_record(tmp_path)
    except RecordError as error:
        assert "\n" not in str(error)
        return
    if case == CASE:
        judge(case, strategy, record, expect(case, case.semantics))
