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
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as torch_load_file
from safetensors.torch import save as torch_save
from safetensors.torch import save_file as torch_save_file
from strategies import cases
from synthetic import CUTS, STRATEGY, record_of

from equivtests.cases.case import Case, Layout, Model
from equivtests.chapters.records import read_record, write_record
from equivtests.errors import RecordError
from equivtests.judge.form import form_problems
from equivtests.judge.judge import judge
from equivtests.record.observation import Collective, Observation, Place, Record
from equivtests.record.serialize import rank_from_bytes, rank_to_bytes
from equivtests.reference.expectation import expect

CASE = Case("stored", Model("linear"), ((((3, 2),), ((1,),)), (((1,),), ((4,),))), Layout(2))


def plain(observations: list[Observation]) -> list[Any]:
    """What can be compared: everything, arrays by their bytes, in the order of each rank."""
    shown = sorted(observations, key=lambda o: o.rank)
    arrays = [(o.array.dtype, o.array.shape, o.array.tobytes()) for o in shown]
    return [arrays, [dataclasses.replace(o, array=np.zeros(())) for o in shown]]


def same(a: Record, b: Record) -> bool:
    """Equal in everything, arrays bit for bit."""
    equal = (a.world, a.device, a.start, a.collectives) == (b.world, b.device, b.start, b.collectives)
    return equal and plain(a.observations) == plain(b.observations)


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
    record = Record(2, "cuda", [shown], {0: [], 1: [Collective("all_reduce", (0, 1), 6, "float32", 0)]}, start=1)
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


def test_a_record_replaces_the_one_that_was_there(tmp_path: Path) -> None:
    wider = CASE.replace(windows=(((), (), ()),) * 2, layout=Layout(3))
    write_record(tmp_path, wider, STRATEGY, Record(3))
    write_record(tmp_path, CASE, STRATEGY, Record(2))
    assert read_record(tmp_path)[2] == Record(2)


# ------------------------------------------------------------------------------------------ one rank's bytes


@settings(max_examples=15)
@given(
    cases(), st.sampled_from(CUTS), st.sampled_from([None, [], [Collective("all_gather", (0, 2), 7, "bfloat16", 1)]])
)
def test_what_a_rank_sends_is_what_arrives(case: Case, cut: Any, collectives: list[Collective] | None) -> None:
    for rank in range(case.layout.world):
        shown = [o for o in record_of(case, cut).observations if o.rank == rank]
        text, arrays = rank_to_bytes(shown, collectives)
        found, received = rank_from_bytes(text.encode(), arrays, rank, case.updates)
        assert plain(found) == plain(shown) and received == collectives
        assert rank_to_bytes(found, received) == (text, arrays)


def read_entries(*entries: dict[str, Any], **arrays: Any) -> list[Observation]:
    """What is read of entries as a stranger writes them, as rank 3."""
    numbered = {key.removeprefix("_"): torch.as_tensor(array) for key, array in arrays.items()}
    return rank_from_bytes(json.dumps({"entries": entries}), torch_save(numbered), 3)[0]


def test_the_least_entry_is_a_whole_copy_of_the_rank() -> None:
    shown = read_entries({"kind": "weight", "name": "w", "update": 1}, _0=[[1.0, 2.0]])[0]
    assert (shown.rank, shown.update, shown.microbatch, shown.dtype) == (3, 1, None, "float32")
    assert shown.place == Place((1, 2), replica=3) and shown.array.tolist() == [[1.0, 2.0]]


def test_parts_and_shares_belong_to_one_copy_unless_they_say_otherwise() -> None:
    places = [{"shape": [4], "box": [[1, 3]]}, {"shape": [4], "interval": [1, 3]}, {"partial": "sum"}]
    places.append({"shape": [4], "box": [[1, 3]], "replica": 5})
    entries = [{"kind": "gradient", "name": "w", "update": 0, "place": place, "array": "g"} for place in places]
    assert [o.place for o in read_entries(*entries, g=[1.0, 2.0])] == [
        Place((4,), box=((1, 3),)),
        Place((4,), interval=(1, 3)),
        Place((2,), partial="sum"),
        Place((4,), box=((1, 3),), replica=5),
    ]


def test_kinds_of_one_thing_need_no_name() -> None:
    kinds = ("inputs", "tokens", "loss", "norm", "clip", "lr", "step", "cursor", "weight_norm")
    shown = read_entries(*({"kind": kind, "update": 0, "array": "x"} for kind in kinds), x=1.0)
    assert [o.name for o in shown] == list(kinds)


def test_an_array_may_be_named_by_several_entries() -> None:
    entries = [{"kind": "weight", "name": "w", "update": update, "array": "same"} for update in (0, 1)]
    assert [(o.update, o.array.tolist()) for o in read_entries(*entries, same=[7])] == [(0, [7]), (1, [7])]


def test_bfloat16_is_read_in_both_of_its_forms() -> None:
    values = torch.tensor([1.0, -2.5, 3e38, 0.0], dtype=torch.bfloat16)
    arrays = {"native": values, "bits": values.view(torch.uint16).clone()}
    entries = [
        {"kind": "inputs", "update": 0, "array": "native"},
        {"kind": "inputs", "update": 0, "array": "native", "dtype": "bfloat16"},
        {"kind": "inputs", "update": 0, "array": "bits", "dtype": "bfloat16"},
    ]
    for shown in read_entries(*entries, **arrays):
        assert shown.dtype == "bfloat16" and shown.array.dtype == np.uint16
        assert np.array_equal(shown.values(), values.float().numpy())


# ------------------------------------------------------------------------------------ what strangers write


def edit(change: Callable[[dict[str, Any]], Any], name: str = "record.json") -> Callable[[Path], None]:
    """A fault that changes the JSON data of a file."""

    def apply(directory: Path) -> None:
        path = directory / name
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return apply


def entry(**changes: Any) -> Callable[[Path], None]:
    """A fault in the first entry of rank 0 (the weights entering the first update)."""
    return edit(lambda data: data["entries"][0].update(changes), "rank-0.json")


def without(field: str) -> Callable[[Path], None]:
    return edit(lambda data: data["entries"][0].pop(field), "rank-0.json")


def placed(**changes: Any) -> Callable[[Path], None]:
    return edit(lambda data: data["entries"][0]["place"].update(changes), "rank-0.json")


def part_without_shape(data: dict[str, Any]) -> None:
    data["entries"][0]["place"] = {"interval": [0, 15]}


def replaced(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_bytes(content)


def without_file(name: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).unlink()


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


def in_eight_bits(directory: Path) -> None:
    """The first array of rank 0 in a dtype that numpy does not have."""
    arrays = torch_load_file(directory / "rank-0.safetensors")
    torch_save_file({**arrays, "0": arrays["0"].to(torch.float8_e4m3fn)}, directory / "rank-0.safetensors")


def one_rank_more(directory: Path) -> None:
    (directory / "rank-2.json").write_text('{"entries": []}')


FIRST = "rank-0.json: entries[0] (weight linear.weight): "
NOT_SAFETENSORS = "rank-0.safetensors is not a safetensors file"
LACKS_LOSS = "strategy.observes lacks loss, which are mandatory"
ALL_BUT_LOSS = ["gradient", "inputs", "weight"]

BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no record.json": (without_file("record.json"), "record.json cannot be read"),
    "a directory for record.json": (directory_for_record, "record.json cannot be read"),
    "a rank's arrays missing": (without_file("rank-1.safetensors"), "rank-1.safetensors is missing"),
    "a rank's entries missing": (without_file("rank-1.json"), "rank-1.json is missing"),
    "a rank too many": (one_rank_more, "rank-2.json: the world is 2"),
    "empty record.json": (replaced("record.json", b""), "record.json: Expecting value"),
    "half of record.json": (truncated("record.json", 0.5), "record.json: "),
    "record.json not in UTF-8": (replaced("record.json", b"\xff\xfe{}"), "record.json: 'utf-8' codec"),
    "deep record.json": (replaced("record.json", b"[" * 100_000), "record.json: maximum recursion depth"),
    "a list": (replaced("record.json", b"[]"), "record.json: expected an object, got []"),
    "unknown field": (edit(lambda data: data.update(x=1)), "record.json: unknown field 'x'"),
    "missing field": (edit(lambda data: data.pop("strategy")), "record.json: field 'strategy' is missing"),
    "an older format": (edit(lambda data: data.update(format=1, entries=[])), "format 1; this version reads 2"),
    "another world": (edit(lambda data: data.update(world=3)), "world 3, but the case has 2 ranks"),
    "a case that is not valid": (
        edit(lambda data: data["case"].update(accumulation=0)),
        "accumulation must be at least 1",
    ),
    "a start after the end": (edit(lambda data: data.update(start=2)), "start 2, but the case has 2 updates"),
    "an unknown algorithm": (edit(lambda data: data["strategy"].update(algorithm="magic")), "'magic'"),
    "a mandatory kind left out": (edit(lambda data: data["strategy"].update(observes=ALL_BUT_LOSS)), LACKS_LOSS),
    "an unknown device": (edit(lambda data: data.update(device="abacus")), "record.json.device: expected one of"),
    "empty entries": (replaced("rank-0.json", b""), "rank-0.json: not JSON: Expecting value"),
    "half of the entries": (truncated("rank-0.json", 0.5), "rank-0.json: not JSON: "),
    "entries not in UTF-8": (replaced("rank-0.json", b'{"\xff'), "rank-0.json: not JSON: 'utf-8' codec"),
    "deep entries": (replaced("rank-0.json", b"[" * 100_000), "rank-0.json: not JSON: maximum recursion depth"),
    "a list of entries": (replaced("rank-0.json", b"[]"), "rank-0.json: expected an object, got []"),
    "no entries": (replaced("rank-0.json", b"{}"), "rank-0.json: field 'entries' is missing"),
    "a malformed collective": (
        edit(lambda data: data.update(collectives=[{"operation": "all_reduce"}]), "rank-0.json"),
        "rank-0.json.collectives[0]: field 'dtype' is missing",
    ),
    "unknown field of an entry": (entry(rank=0), "rank-0.json.entries[0]: unknown field 'rank'"),
    "unknown kind": (entry(kind="wieght"), "rank-0.json: entries[0] (wieght linear.weight): unknown kind"),
    "a weight without a name": (without("name"), "entries[0] (weight ): name is missing"),
    "an entry without an update": (without("update"), "rank-0.json.entries[0]: field 'update' is missing"),
    "negative update": (entry(update=-1), FIRST + "update -1, but the case's are 0 to 2"),
    "update out of range": (entry(update=3), FIRST + "update 3, but the case's are 0 to 2"),
    "update as text": (entry(update="0"), 'rank-0.json.entries[0].update: expected int, got "0"'),
    "wrong dtype tag": (entry(dtype="float64"), FIRST + "array of float32, but the entry says float64"),
    "bfloat16 tag on floats": (entry(dtype="bfloat16"), FIRST + "array of float32, but the entry says bfloat16"),
    "a key without an array": (entry(array="first"), FIRST + "no array 'first' in the rank's safetensors file"),
    "wrong size": (placed(shape=[3, 4]), FIRST + "array of 15 elements at a place of 12 (shape (3, 4))"),
    "box out of the shape": (placed(box=[[0, 3], [1, 6]]), "box [(0, 3), (1, 6)] does not lie in the shape (3, 5)"),
    "box with another rank": (placed(box=[[0, 15]]), "box [(0, 15)] does not lie in the shape (3, 5)"),
    "negative box": (placed(box=[[-3, 0], [0, 5]]), "box [(-3, 0), (0, 5)] does not lie in the shape (3, 5)"),
    "backward box": (placed(box=[[3, 0], [5, 0]]), "box [(3, 0), (5, 0)] does not lie in the shape (3, 5)"),
    "interval out of the shape": (placed(interval=[1, 16]), "interval (1, 16) does not lie in the shape (3, 5)"),
    "negative interval": (placed(interval=[-15, 0]), "interval (-15, 0) does not lie in the shape (3, 5)"),
    "negative shape": (placed(shape=[-3, -5]), "shape (-3, -5) has a negative size"),
    "a triple for a pair": (placed(interval=[0, 1, 2]), "place.interval: expected 2 items"),
    "a part without a shape": (edit(part_without_shape, "rank-0.json"), "give the shape of the whole tensor"),
    "a box and an interval": (placed(box=[[0, 3], [0, 5]], interval=[0, 15]), "a box and an interval"),
    "a huge whole": (placed(shape=[2**50], interval=[0, 15]), "no tensor of a case is as large"),
    "a huge empty whole": (placed(shape=[0, 2**80]), "no tensor of a case is as large"),
    "a whole of many dimensions": (placed(shape=[15] + [1] * 99), "no tensor of a case is as large"),
    "an unknown combination": (placed(partial="max"), "place.partial: expected one of"),
    "truncated arrays": (truncated("rank-0.safetensors", 0.9), NOT_SAFETENSORS),
    "no header": (truncated("rank-0.safetensors", 0.0), NOT_SAFETENSORS),
    "text for arrays": (replaced("rank-0.safetensors", b"weights"), NOT_SAFETENSORS),
    "a huge header": (replaced("rank-0.safetensors", b"\xff" * 64), NOT_SAFETENSORS),
    "an array lost": (lambda d: save_file({"1": np.zeros(2)}, d / "rank-0.safetensors"), FIRST + "no array '0'"),
    "an array too short": (rewritten(lambda a: a.reshape(-1)[:-1].copy()), "array of 14 elements at a place of 15"),
    "an array of other type": (rewritten(lambda a: a.astype(np.int32)), "array of int32, but the entry says float32"),
    "an array of complex numbers": (rewritten(lambda a: a.astype(np.complex64)), "array of C64; known are F64, "),
    "an array of eight bits": (in_eight_bits, "array of F8_E4M3; known are F64, "),
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


@pytest.mark.parametrize("name", ["record.json", "rank-0.json", "rank-0.safetensors"])
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


FILES = ("record.json", "rank-0.json", "rank-1.json", "rank-0.safetensors", "rank-1.safetensors")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_either_refused_or_judged(tmp_path: Path, data: st.DataObject) -> None:
    """A few bytes of a file overwritten: RecordError, or what is wrong with it and a verdict, never another exception."""
    write_record(tmp_path, CASE, STRATEGY, record_of(CASE, "flat"))
    path = tmp_path / data.draw(st.sampled_from(FILES))
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
        form_problems(case, strategy, record)
        judge(case, strategy, record, expect(case, case.semantics))
