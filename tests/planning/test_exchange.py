"""What GPUs send to each other, worked out by hand from a link's rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from temper.planning.exchange import (
    LINK_REACH,
    MACHINE_HOP_SECONDS,
    NETWORK_HOP_SECONDS,
    START_SECONDS,
    context_seconds,
    exchange_seconds,
    exchanged_bytes,
    expert_seconds,
    gather_seconds,
    gradient_seconds,
    publishing_seconds,
    ring_seconds,
    tokens_seconds,
)
from temper.planning.gpus import GPUS
from temper.planning.shape import decoder_shape
from temper.planning.workload import AdapterShape, Workload
from tests.planning.conftest import EXPERTS

Make = Callable[..., Workload]
H200 = GPUS["h200"]
INSTANT = 1e-3
"""Above the seconds that a message spends on hops."""


def test_data_sheets_say_how_gpus_are_linked() -> None:
    """Half of NVLink's 600, 900 and 1,800 GB/s, and 200 or 400 Gb/s of network for each GPU; else as the host."""
    links = {name: (gpu.peer_link, gpu.network, gpu.per_machine) for name, gpu in GPUS.items()}
    assert links["a100-80"] == links["a100-40"] == (300e9, 25e9, 8)
    assert links["h100-80"] == links["h200"] == (450e9, 50e9, 8)
    assert links["b200"] == (900e9, 50e9, 8)
    assert links["4090"] == (GPUS["4090"].link, 100e9 / 8 / 8, 8)
    assert all(gpu.peer_link >= gpu.network for gpu in GPUS.values())


def test_a_ring_inside_a_machine_brings_every_rank_what_it_lacks() -> None:
    """Of 8 GB on 4 ranks each lacks 6."""
    assert ring_seconds(8e9, 4, H200) == pytest.approx(
        6e9 / (450e9 * LINK_REACH) + START_SECONDS + 3 * MACHINE_HOP_SECONDS
    )
    assert ring_seconds(8e9, 1, H200) == 0.0


def test_a_ring_over_machines_is_as_fast_as_their_networks_together() -> None:
    """Two machines of eight: each lacks half of 8 GB and has 8 x 50 GB/s; inside 15 of 16 parts go over NVLink."""
    between, inside = 4e9 / (8 * 50e9), 8e9 * 15 / 16 / 450e9
    hops = 14 * MACHINE_HOP_SECONDS + NETWORK_HOP_SECONDS
    assert inside > between, "NVLink is the narrower of the two here"
    assert ring_seconds(8e9, 16, H200) == pytest.approx(inside / LINK_REACH + START_SECONDS + hops)
    slow = replace(H200, network=10e9)
    assert ring_seconds(8e9, 16, slow) == pytest.approx(4e9 / 80e9 / LINK_REACH + START_SECONDS + hops)


def test_small_messages_wait_for_hops() -> None:
    assert ring_seconds(1, 512, H200) > 448 * MACHINE_HOP_SECONDS
    assert ring_seconds(1, 512, H200) < 3e-3


def test_copies_send_float32_gradients_there_and_back(make_workload: Make) -> None:
    """To be added up, and the sum back: 7/8 of four bytes a parameter, twice."""
    work = make_workload("7b", trainers=8)
    once = 4 * work.shape.parameters * 7 / 8 / (450e9 * LINK_REACH)
    assert gradient_seconds(work, H200) == pytest.approx(2 * once, abs=INSTANT)
    assert exchange_seconds(work, H200, computing=100.0) == gradient_seconds(work, H200), "nothing hides it"
    assert gather_seconds(work, H200) == 0.0


def test_an_adapter_sends_its_factors_alone(make_workload: Make) -> None:
    work = make_workload("7b", trainers=8, adapter=AdapterShape(rank=32))
    assert gradient_seconds(work, H200) == pytest.approx(
        2 * 4 * work.trained_parameters * 7 / 8 / (450e9 * LINK_REACH), abs=INSTANT
    )


def test_parts_gather_weights_twice_and_share_out_gradients_once_in_every_microbatch(make_workload: Make) -> None:
    """Two bytes a weight forward and again backward, four bytes a gradient: eight bytes a parameter in all."""
    work = make_workload("7b", trainers=8, parts=True)
    assert work.microbatches == 2, "32 rows of 562 tokens on a GPU, 16,384 tokens at once"
    sent = (2 + 2 + 4) * work.shape.parameters * 7 / 8 / (450e9 * LINK_REACH)
    first = 2 * work.shape.parameters / 29 * 7 / 8 / (450e9 * LINK_REACH)
    assert exchange_seconds(work, H200, computing=0.0) == pytest.approx(2 * (sent + first), abs=10 * INSTANT)
    one = replace(work, choice=replace(work.choice, tokens_per_microbatch=65536))
    assert one.microbatches == 1
    assert exchange_seconds(one, H200, computing=0.0) == pytest.approx(sent + first, abs=10 * INSTANT)


def test_what_is_computed_meanwhile_hides_the_exchange_of_parts_but_for_the_first_layer(make_workload: Make) -> None:
    work = make_workload("7b", trainers=8, parts=True)
    hidden = exchange_seconds(work, H200, computing=100.0)
    assert hidden == pytest.approx(work.microbatches * gather_seconds(work, H200) / 29)
    bare, half = (exchange_seconds(work, H200, computing=seconds) for seconds in (0.0, 0.1))
    assert bare - half == pytest.approx(0.1)


def test_one_trainer_exchanges_nothing(make_workload: Make) -> None:
    assert exchange_seconds(make_workload("7b", parts=True), H200, computing=0.0) == 0.0


def test_weights_go_to_samplers_by_the_way_that_is_there(make_workload: Make) -> None:
    size = 2 * make_workload("7b").shape.parameters
    near = make_workload("7b", trainers=4, num_samplers=4, engine="apart")
    assert publishing_seconds(near, H200) == pytest.approx(size / (450e9 * LINK_REACH))
    assert publishing_seconds(replace(near, num_samplers=5), H200) == pytest.approx(size / (50e9 * LINK_REACH))
    parts = replace(near, parts=True)
    assert publishing_seconds(parts, H200) == pytest.approx(size / (450e9 * LINK_REACH) + gather_seconds(parts, H200))
    assert publishing_seconds(make_workload("7b", engine="copied"), H200) == pytest.approx(3 * size / 4.8e12)
    assert publishing_seconds(make_workload("7b"), H200) == 0.0


def test_tokens_travel_to_heads_where_several_go_over_a_row(make_workload: Make) -> None:
    alone = make_workload("7b", trainers=8, parts=True)
    four = replace(alone, context=4)
    assert four.trainer_rows == 4 * alone.trainer_rows
    assert four.packed_tokens == -(-four.microbatch_tokens // 4)
    assert context_seconds(alone, H200) == 0.0
    shape, size = four.shape, four.packed_tokens * four.itemsize
    assert shape.num_kv_heads % 4 == 0
    there, back = size * (shape.query_width + 2 * shape.kv_width), size * shape.query_width
    once = tokens_seconds(there, 4, H200) + tokens_seconds(back, 4, H200)
    ways = 3 if four.choice.gradient_checkpointing else 2
    assert context_seconds(four, H200) == pytest.approx(ways * shape.num_layers * once)
    copied = replace(four, context=8)
    assert shape.num_kv_heads < 8, "heads of keys are copied"
    more = size / 2 * (shape.query_width + 2 * 8 * shape.head_dim)
    assert context_seconds(copied, H200) == pytest.approx(
        ways * shape.num_layers * (tokens_seconds(more, 8, H200) + tokens_seconds(back / 2, 8, H200)), rel=1e-3
    )
    waited = exchange_seconds(four, H200, 1e9)
    first = gather_seconds(four, H200) / (shape.num_layers + 1)
    assert waited == pytest.approx(four.microbatches * (first + context_seconds(four, H200)))


def test_layers_that_four_compute_together_stay_and_tokens_come_to_all(make_workload: Make) -> None:
    """Of eight trainers two have the same slice, and gather a quarter of a layer; of four nobody gathers any."""
    gathers = make_workload("7b", trainers=8, parts=True)
    eight = replace(gathers, context=4, tensor=4)
    four = replace(eight, trainers=4)
    shape = eight.shape
    assert eight.staying_parameters == shape.layers - shape.layers // 4
    assert four.staying_parameters == shape.layers
    assert gather_seconds(four, H200) < gather_seconds(eight, H200) < gather_seconds(gathers, H200)
    assert publishing_seconds(eight, H200) == publishing_seconds(gathers, H200), "a sampler holds all of a layer"
    size = eight.microbatch_tokens * shape.width * 2
    assert exchanged_bytes(eight) == size
    ways = 3 if eight.choice.gradient_checkpointing else 2
    assert context_seconds(eight, H200) == pytest.approx(ways * shape.num_layers * 4 * ring_seconds(size, 4, H200))
    assert expert_seconds(eight, H200) == 0.0


def test_experts_that_stay_are_not_gathered_and_their_tokens_travel(make_workload: Make) -> None:
    """Of 8 GB on each of 4 GPUs three quarters leave it; over two machines of eight, half by its own network."""
    assert tokens_seconds(8e9, 4, H200) == pytest.approx(6e9 / (450e9 * LINK_REACH), abs=INSTANT)
    assert tokens_seconds(8e9, 16, H200) == pytest.approx(4e9 / (50e9 * LINK_REACH), abs=INSTANT)
    gathers = replace(make_workload("7b", trainers=8, parts=True), shape=decoder_shape(EXPERTS))
    stays = replace(gathers, experts=True)
    shape = stays.shape
    experts = shape.num_layers * 3 * shape.width * shape.mlp_width * shape.num_experts
    assert stays.staying_parameters == experts > 0.9 * shape.layers
    left = 1 - experts / shape.parameters
    assert gather_seconds(stays, H200) == pytest.approx(left * gather_seconds(gathers, H200), abs=10 * INSTANT)
    assert gradient_seconds(stays, H200) == pytest.approx(left * gradient_seconds(gathers, H200), abs=10 * INSTANT)
    assert publishing_seconds(stays, H200) == publishing_seconds(gathers, H200), "a sampler holds all experts"
    one = tokens_seconds(exchanged_bytes(stays), 8, H200)
    ways = 6 if stays.choice.gradient_checkpointing else 4
    assert expert_seconds(stays, H200) == pytest.approx(ways * shape.num_layers * one)
    first = gather_seconds(stays, H200) / (shape.num_layers + 1)
    waited = exchange_seconds(stays, H200, 1e9)
    assert waited == pytest.approx(stays.microbatches * (first + expert_seconds(stays, H200)))
    assert expert_seconds(gathers, H200) == 0.0
