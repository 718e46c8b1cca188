"""Hand-checked numbers of distributed training, reproduced exactly by the functions that the suite itself uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from equivtests.cases.parameters import Parameter
from equivtests.reference import ledger
from equivtests.reference.ledger import EXPECTED, BytesPerParameter, LedgerInput
from equivtests.reference.schedules import SCHEDULES, prescribed
from equivtests.reference.timeline import simulate

EXAMPLES = json.loads((Path(__file__).parent / "data" / "worked-examples.json").read_text(encoding="utf-8"))
GB, MIB = 10**9, 2**20
MIXED_ADAM = BytesPerParameter(weights=2, gradients=2, optimizer=4 + 8)


def entries(key: str, *required: str) -> list[Any]:
    """The entries of a key that give all the required fields. Fails if there are none."""
    found = [e for e in EXAMPLES[key] if all(field in e for field in required)]
    assert found, f"no entry of {key} has {required}"
    return found


# ----------------------------------------------------------------------------------------- losses, batches


@pytest.mark.parametrize("example", entries("token_weighted_loss", "token_weighted_mean"))
def test_token_weighted_loss(example: dict[str, Any]) -> None:
    sums, tokens = example["loss_sums"], example["valid_tokens"]
    assert ledger.token_weighted_mean(sums, tokens) == example["token_weighted_mean"]
    assert ledger.token_weighted_mean(sums, tokens) != example["wrong_mean_of_local_means"]
    local = ledger.local_objectives(sums, tokens)
    assert local is not None and local == example["ddp_local_objectives"]
    assert ledger.averaged_gradient([[objective] for objective in local]) == [example["ddp_average_of_objectives"]]


@pytest.mark.parametrize("example", entries("token_weighted_loss", "must"))
def test_an_empty_window_has_no_loss(example: dict[str, Any]) -> None:
    assert ledger.token_weighted_mean(example["loss_sums"], example["valid_tokens"]) is None
    assert ledger.local_objectives(example["loss_sums"], example["valid_tokens"]) is None


@pytest.mark.parametrize("example", entries("effective_batch", "examples_per_update"))
def test_effective_batch(example: dict[str, Any]) -> None:
    got = ledger.effective_batch(example["micro_batch"], example["accumulation"], example["data_parallel"])
    assert got == example["examples_per_update"]


@pytest.mark.parametrize("example", entries("effective_batch", "reductions_per_update"))
def test_one_reduction_per_update_whatever_the_accumulation(example: dict[str, Any]) -> None:
    model = (Parameter("weight", (3, 5)),)
    layout = LedgerInput(model, shard=example["data_parallel"], microbatches=example["accumulation"])
    (payload,) = EXPECTED["all-reduce"](layout).values()
    assert payload.elements == example["reductions_per_update"] * 15


@pytest.mark.parametrize("example", entries("effective_batch", "devices"))
def test_not_all_devices_count(example: dict[str, Any]) -> None:
    degrees = example["data_parallel"], example["tensor_parallel"], example["pipeline_parallel"]
    examples = ledger.effective_batch(example["micro_batch"], example["accumulation"], example["data_parallel"])
    assert ledger.devices(*degrees) == example["devices"]
    wrong = example["micro_batch"] * example["accumulation"] * example["devices"]
    assert f"{wrong // examples} times too many" == example["wrong_if_all_devices_counted"]


@pytest.mark.parametrize("example", entries("data_parallel_update"))
def test_data_parallel_update(example: dict[str, Any]) -> None:
    averaged = ledger.averaged_gradient(example["rank_mean_gradients"])
    assert averaged == example["averaged_gradient"]
    updated = ledger.sgd_update(example["start_weights"], averaged, example["learning_rate"])
    assert updated == example["updated_weights"]


@pytest.mark.parametrize("example", entries("mesh"))
def test_mesh(example: dict[str, Any]) -> None:
    degrees = example["data_parallel"], example["tensor_parallel"], example["pipeline_parallel"]
    assert ledger.devices(*degrees) == example["devices"]


# -------------------------------------------------------------------------------------------- communication


@pytest.mark.parametrize("example", entries("ring_all_reduce", "message_bytes"))
def test_ring_all_reduce(example: dict[str, Any]) -> None:
    size, ranks = example["message_bytes"], example["ranks"]
    sent = ledger.ring_all_reduce_bytes(size, ranks)
    assert sent == example["sent_bytes_per_rank"] == example.get("received_bytes_per_rank", sent)
    assert ledger.ring_all_reduce_rounds(ranks) == example["rounds"]
    direct = ledger.direct_all_reduce_bytes(size, ranks)
    assert direct == example.get("naive_send_to_each_other_rank_bytes", direct)


SENT_BYTES: dict[str, Callable[[int, int], float]] = {"2*(P-1)/P*S": lambda P, S: 2 * (P - 1) / P * S}
SECONDS: dict[str, Callable[[int, int, float, float], float]] = {
    "2*(P-1)*alpha + 2*(P-1)/P*S/B": lambda P, S, alpha, B: 2 * (P - 1) * alpha + 2 * (P - 1) / P * S / B
}
"""The formulas of the table, by their text there: another text needs another function."""


@pytest.mark.parametrize("example", entries("ring_all_reduce", "formula_seconds"))
@pytest.mark.parametrize(("P", "S"), [(1, 96), (2, 96), (3, 96), (4, 120_000_000)])
def test_ring_formulas(example: dict[str, Any], P: int, S: int) -> None:
    """The formulas as they are written in the table."""
    alpha, B = 0.25, 1024.0
    sent, seconds = SENT_BYTES[example["formula_sent_bytes_per_rank"]], SECONDS[example["formula_seconds"]]
    assert ledger.ring_all_reduce_bytes(S, P) == pytest.approx(sent(P, S))
    assert ledger.ring_all_reduce_seconds(S, P, alpha, B) == pytest.approx(seconds(P, S, alpha, B))


@pytest.mark.parametrize(("size", "ranks"), [(8, 0), (-1, 4), (8, 2.5), (0.5, 4)])
def test_ring_bad_input(size: Any, ranks: Any) -> None:
    with pytest.raises(ValueError):
        ledger.ring_all_reduce_bytes(size, ranks)


ALGORITHM = {
    "ddp_all_reduce": "all-reduce",
    "zero1_if_reduce_scatter_then_all_gather": "zero1-reduce-scatter",
    "zero1_if_all_reduce_then_all_gather": "zero1-all-reduce",
    "zero2": "zero2",
    "zero3": "zero3",
}


@pytest.mark.parametrize("example", entries("zero_communication_MiB_sent_per_rank"))
@pytest.mark.parametrize("field", ALGORITHM)
def test_zero_communication(example: dict[str, Any], field: str) -> None:
    """From the expected collectives of one micro-batch; a broadcast of every tensor sends what an all-gather sends."""
    assert example["gradient_MiB"] == example["parameter_MiB"]
    model = (Parameter("weight", (example["parameter_MiB"] * MIB // 4,)),)
    expected = EXPECTED[ALGORITHM[field]](LedgerInput(model, shard=example["ranks"]))
    assert ledger.sent_bytes(expected) == example[field] * MIB


@pytest.mark.parametrize("example", entries("zero_communication_MiB_sent_per_rank"))
def test_half_of_an_all_reduce(example: dict[str, Any]) -> None:
    got = ledger.ring_shift_bytes(example["gradient_MiB"] * MIB, example["ranks"])
    assert got == example["one_reduce_scatter_or_all_gather"] * MIB


@pytest.mark.parametrize("example", entries("strategy_communication_units"))
def test_units_of_data_parallel_communication(example: dict[str, Any]) -> None:
    assert ledger.ring_all_reduce_bytes(example["parameters"], example["ranks"]) == example["data_parallel"]


UNITS: dict[str, Callable[[int, int, int], float]] = {
    "2*(P-1)/P*s": lambda P, L, s: 2 * (P - 1) / P * s,
    "2*L*ring(H)": lambda P, L, H: 2 * L * 2 * (P - 1) / P * H,
    "2*H*(L-1)": lambda P, L, H: 2 * H * (L - 1),
}


@pytest.mark.parametrize("example", entries("strategy_communication_units"))
def test_units_of_tensor_and_pipeline_parallel_communication(example: dict[str, Any]) -> None:
    """Teaching units: one token, one stage per layer, two all-reduces per layer."""
    layers, hidden, ranks = example["layers"], example["hidden"], example["ranks"]
    assert ledger.tensor_parallel_bytes(layers, hidden, ranks) == example["tensor_parallel"]
    assert ledger.pipeline_bytes(hidden, stages=layers) == example["pipeline_parallel"]


@pytest.mark.parametrize("example", entries("strategy_communication_units", "formulas"))
@pytest.mark.parametrize(("P", "L", "H"), [(1, 1, 3), (2, 3, 5), (4, 2, 4)])
def test_unit_formulas(example: dict[str, Any], P: int, L: int, H: int) -> None:
    formulas = example["formulas"]
    assert ledger.ring_all_reduce_bytes(H, P) == pytest.approx(UNITS[formulas["ring"]](P, L, H))
    assert ledger.tensor_parallel_bytes(L, H, P) == pytest.approx(UNITS[formulas["tensor"]](P, L, H))
    assert ledger.pipeline_bytes(H, L) == UNITS[formulas["pipeline"]](P, L, H)
    assert ledger.tensor_parallel_bytes(L, H, P, all_reduces=4) == 2 * ledger.tensor_parallel_bytes(L, H, P)


@pytest.mark.parametrize("example", entries("tensor_parallel"))
def test_tensor_parallel(example: dict[str, Any]) -> None:
    x, weight, whole = example["X"], example["W"], example["full_output"]
    columns, rows = (shards(x, weight, 2) for shards in (ledger.column_shard_outputs, ledger.row_shard_outputs))
    combined: dict[str, list[float]] = {
        "concatenate": [value for part in columns for value in part],
        "sum": [sum(values) for values in zip(*rows, strict=True)],
        "average": ledger.averaged_gradient(rows),
    }
    assert rows == example["row_partial_outputs"]
    assert ledger.linear(x, weight) == whole
    assert combined[example["column_shards_combine"]] == combined[example["combine_row_partials"]] == whole
    assert combined[example["wrong_combine"]] != whole


# ----------------------------------------------------------------------------------------------- pipelines


def idle_of(schedule: str, example: dict[str, Any]) -> Fraction:
    """By simulation of the prescribed order; the closed form agrees."""
    numbers = example["stages"], example.get("chunks_per_stage", 1), example["micro_batches"]
    idle = simulate(prescribed(schedule, *numbers)).idle
    assert SCHEDULES[schedule].idle_fraction(*numbers) == idle
    return idle


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("field", ["utilization", "idle_fraction"])
def test_pipeline_bubble(schedule: str, field: str) -> None:
    for example in entries("pipeline_bubble", field):
        idle = idle_of(schedule, example)
        assert {"utilization": 1 - idle, "idle_fraction": idle}[field] == Fraction(str(example[field]))


@pytest.mark.parametrize("example", entries("pipeline_bubble", "idle_fraction_interleaved"))
def test_interleaved_pipeline_bubble(example: dict[str, Any]) -> None:
    assert idle_of("interleaved-1f1b", example) == Fraction(example["idle_fraction_interleaved"])


BUBBLES: dict[str, Callable[[int, int, int], Fraction]] = {
    "M/(M+P-1)": lambda P, V, M: 1 - Fraction(M, M + P - 1),
    "(P-1)/(M+P-1)": lambda P, V, M: Fraction(P - 1, M + P - 1),
    "(P-1)/(V*M+P-1)": lambda P, V, M: Fraction(P - 1, V * M + P - 1),
}
"""Idle fractions by the text of the formula; a utilization is what they leave."""


@pytest.mark.parametrize("example", entries("pipeline_bubble", "formula_idle"))
@pytest.mark.parametrize(("P", "V", "M"), [(1, 1, 2), (3, 1, 4), (4, 1, 8), (2, 3, 4), (4, 2, 8)])
def test_bubble_formulas(example: dict[str, Any], P: int, V: int, M: int) -> None:
    interleaved = SCHEDULES["interleaved-1f1b"].idle_fraction(P, V, M)
    assert interleaved == BUBBLES[example["formula_idle_interleaved"]](P, V, M)
    for schedule in ("gpipe", "1f1b"):
        idle = SCHEDULES[schedule].idle_fraction(P, 1, M)
        assert idle == BUBBLES[example["formula_idle"]](P, 1, M) == BUBBLES[example["formula_utilization"]](P, 1, M)


# -------------------------------------------------------------------------------------------------- memory

STAGES: tuple[ledger.Stage, ...] = ("replicated", "zero1", "zero2", "zero3")
STATE_BYTES: dict[str, Callable[[int, int], float]] = {
    "16*N": lambda N, D: 16 * N,
    "(4 + 12/D)*N": lambda N, D: (4 + 12 / D) * N,
    "(2 + 14/D)*N": lambda N, D: (2 + 14 / D) * N,
    "16*N/D": lambda N, D: 16 * N / D,
}
COLUMNS: dict[str, Callable[[int], float]] = {"262144/n": lambda n: 262144 / n}


@pytest.mark.parametrize("example", entries("state_bytes", "bytes_per_parameter"))
def test_state_of_mixed_precision_adam(example: dict[str, Any]) -> None:
    each = example["bytes_per_parameter"]
    optimizer = each["fp32_master_weights"] + each["fp32_moments"]
    layout = BytesPerParameter(each["low_precision_weights"], each["low_precision_gradients"], optimizer)
    total = ledger.state_bytes("replicated", example["parameters"], layout, 1)
    assert layout == MIXED_ADAM
    assert total == example["total_GB"] * GB
    assert round(float(total / 2**30), 2) == example["total_GiB"]
    weights = ledger.state_bytes("replicated", example["parameters"], BytesPerParameter(layout.weights, 0, 0), 1)
    assert weights == example["weights_only_GB"] * GB


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("example", entries("state_bytes", "per_rank_GB"))
def test_state_per_rank(example: dict[str, Any], stage: ledger.Stage) -> None:
    parameters, shards = example["parameters"], example["data_parallel"]
    got = ledger.state_bytes(stage, parameters, MIXED_ADAM, shards)
    assert got == example["per_rank_GB"][stage] * GB
    assert got == STATE_BYTES[example["formula_bytes"][stage]](parameters, shards)


@pytest.mark.parametrize("example", entries("state_bytes", "zero2_sharded_part_GB"))
def test_sharded_part_of_zero2(example: dict[str, Any]) -> None:
    cut = BytesPerParameter(0, MIXED_ADAM.gradients, MIXED_ADAM.optimizer)
    got = ledger.state_bytes("zero2", example["parameters"], cut, example["data_parallel"])
    assert got == example["zero2_sharded_part_GB"] * GB


@pytest.mark.parametrize("example", entries("state_bytes", "zero3_per_device_GB"))
def test_state_of_a_model_shard(example: dict[str, Any]) -> None:
    tensor, pipeline, data = (example[f"{axis}_parallel"] for axis in ("tensor", "pipeline", "data"))
    shard = ledger.model_shard(example["parameters"], tensor, pipeline)
    assert ledger.devices(data, tensor, pipeline) == example["devices"]
    assert shard == example["parameters_per_model_shard"]
    got = ledger.state_bytes("zero3", int(shard), MIXED_ADAM, data)
    assert got == example["zero3_per_device_GB"] * GB


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("example", entries("state_bytes", "per_device_GB"))
def test_state_per_device(example: dict[str, Any], stage: ledger.Stage) -> None:
    each = BytesPerParameter(example["weights_GB"], example["gradients_GB"], example["optimizer_GB"])
    got = ledger.state_bytes(stage, GB, each, example["devices"])
    assert got == example["per_device_GB"][stage] * GB


@pytest.mark.parametrize("example", entries("state_bytes", "layer"))
def test_one_large_layer(example: dict[str, Any]) -> None:
    parameter = Parameter("layer.weight", tuple(example["layer"]))
    assert parameter.size == example["parameters"]
    assert round(parameter.size * ledger.ITEM_BYTES["float16"] / GB, 1) == example["fp16_GB"]
    rows, columns = example["column_shard_shape_for_n"]
    for n in (1, 2, 8):
        assert ledger.shard_shape(parameter.shape, 1, n) == (rows, COLUMNS[columns](n))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("example", entries("state_bytes", "per_rank_bytes_per_parameter"))
def test_state_without_a_master_copy(example: dict[str, Any], stage: ledger.Stage) -> None:
    kept = example["bytes"]
    each = BytesPerParameter(kept["weights"], kept["gradients"], kept["moments"])
    got = ledger.state_bytes(stage, 1, each, example["data_parallel"])
    assert got == example["per_rank_bytes_per_parameter"][stage]
