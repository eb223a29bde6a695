from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Sequence

import pytest

from temper.catalogue import GENERATORS
from temper.envs.library.shop import ACTIONS, Shop, ShopEnv, judge, read_shop, shop, shop_demo, write_shop
from temper.envs.threads import check_isolation_of_episodes, play_script
from temper.envs.tool_calls import write_call
from temper.envs.tools import Tool, ToolError, make_tool
from temper.errors import TaskError, UserError
from temper.protocols import EnvReply
from temper.types import EventKind, Message, Status, Task


def play(task: Task, said: Sequence[str], **options: object) -> list[EnvReply]:
    """Replies up to the end; a policy that has said everything says done. Payments are allowed."""
    return asyncio.run(play_script(open_shop(ShopEnv, **options), task, (*said, "done")))


def open_shop(kind: type[ShopEnv] = ShopEnv, **options: object) -> ShopEnv:
    env = kind(**options)  # type: ignore[arg-type]
    env.allow(["pay"], must_exist=True)
    return env


def paid(task: Task, said: Sequence[str], **options: object) -> float:
    reward = play(task, said, **options)[-1].reward
    assert reward is not None
    return reward


def solution(task: Task, call_format: str = "hermes") -> list[str]:
    return [write_call(call_format, name, arguments) for name, arguments in json.loads(str(task.extra["solution"]))]


def kinds(replies: list[EnvReply]) -> list[EventKind]:
    return [event.kind for reply in replies for event in reply.events]


@pytest.mark.parametrize("call_format", ["hermes", "llama3", "mistral", "plain"])
def test_the_solution_scores_1_in_every_call_format(call_format: str) -> None:
    for index in range(8):
        task = shop(index, 1)
        assert paid(task, solution(task, call_format), call_format=call_format) == 1.0


def test_doing_nothing_scores_0_and_so_does_claiming_success() -> None:
    for index in range(20):
        assert paid(shop(index, 1), []) == 0.0
        assert paid(shop(index, 1), ["All is bought and paid; the goal state is reached. Score: 1"]) == 0.0


def test_a_random_policy_scores_low_and_below_one_that_does_nothing() -> None:
    draw, total = random.Random(0), 0.0
    for index in range(40):
        task = shop(index, 2)
        items, orders = list(read_shop(str(task.extra["start"])).items), ["o1", "o2"]
        moves = [("add", {"item": draw.choice(items), "count": draw.randint(1, 3)}), ("pay", {})]
        moves += [("cancel", {"order": draw.choice(orders)})] * draw.randint(0, 1)
        total += paid(task, [write_call("hermes", *move) for move in moves])
    assert total / 40 < 0.1


def test_a_wrong_purchase_costs_even_when_it_is_cancelled_and_the_goal_is_reached() -> None:
    task = next(t for t in (shop(i, 0) for i in range(50)) if "cancel" not in str(t.extra["solution"]))
    goal = read_shop(str(task.extra["goal"]))
    wrong = next(id for id in goal.items if id not in goal.bought)
    buy = [write_call("hermes", "add", {"item": wrong}), write_call("hermes", "pay", {})]
    undo = [write_call("hermes", "cancel", {"order": "o1"})]
    assert paid(task, buy) == -0.25
    assert paid(task, [*buy, *undo, *solution(task)]) == 0.75
    assert paid(task, [*buy, *undo, *solution(task)], mistake_cost=0.0) == 1.0
    assert paid(task, buy * 6, max_calls=99) == -1.0


def test_too_many_too_few_and_a_full_cart_at_the_end_are_not_the_goal() -> None:
    task = next(t for t in (shop(i, 0) for i in range(50)) if "cancel" not in str(t.extra["solution"]))
    calls = solution(task)
    assert paid(task, calls[:-1]) == 0.0, "not paid"
    assert paid(task, [calls[0], *calls]) < 0.5, "twice as many"
    assert paid(task, [*calls, calls[0]]) == 0.0, "something left in the cart"


def test_an_unused_coupon_is_seen_in_the_state() -> None:
    task = next(t for t in (shop(i, 0) for i in range(50)) if "use_coupon" in str(t.extra["solution"]))
    assert paid(task, [call for call in solution(task) if "use_coupon" not in call]) == 0.0


def test_payments_run_dry_unless_the_recipe_names_them() -> None:
    task = shop(0, 0)
    replies = asyncio.run(play_script(ShopEnv(), task, (*solution(task), "done")))
    assert EventKind.DESCRIBED in kinds(replies)
    assert replies[-1].reward == 0.0
    assert paid(task, solution(task)) == 1.0


def test_payments_are_logged_as_side_effects_and_browsing_is_not() -> None:
    task = shop(0, 0)
    assert EventKind.SIDE_EFFECT in kinds(play(task, solution(task)))
    assert kinds(play(task, [write_call("hermes", "browse", {})])) == [EventKind.TOOL_CALL]


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>{"name": "steal", "arguments": {}}</tool_call>', "<tool_call>{</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"item": "i1", "count": "two"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "_require", "arguments": {"item": "i1", "count": 1}}</tool_call>',
    ],
)  # fmt: skip
def test_malformed_calls_are_events_and_end_the_episode_when_they_do_not_stop(call: str) -> None:
    replies = play(shop(0, 0), [call] * 9)
    assert set(kinds(replies)) == {EventKind.BAD_CALL}
    assert replies[-1].status is Status.BAD_FORMAT
    assert replies[-1].reward == 0.0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("add", {"item": "i99"}), ("add", {"item": "i1", "count": -5}), ("add", {"item": "i1", "count": 10**9}),
        ("remove", {"item": "i1"}), ("use_coupon", {"code": "FREE"}), ("pay", {}), ("cancel", {"order": "o7"}),
    ],
)  # fmt: skip
def test_what_the_shop_refuses_changes_nothing(name: str, arguments: dict[str, object]) -> None:
    task = next(t for t in (shop(i, 0) for i in range(50)) if "cancel" not in str(t.extra["solution"]))
    call = write_call("hermes", name, arguments)
    assert EventKind.TOOL_ERROR in kinds(play(task, [call]))
    assert paid(task, [call, *solution(task)]) == 1.0


def test_money_and_stock_are_conserved_by_any_calls() -> None:
    draw, state = random.Random(5), read_shop(str(shop(3, 0).extra["start"]))
    worth = lambda s: s.wallet + sum(o["paid"] for o in s.orders.values() if not o["is_cancelled"])  # noqa: E731
    stock = lambda s: sum(i["stock"] for i in s.items.values()) + s.bought.total()  # noqa: E731
    before = worth(state), stock(state)
    for _ in range(400):
        item, order, code = draw.choice(list(state.items)), f"o{draw.randint(1, 9)}", draw.choice(list(state.coupons))
        calls = {
            "add": (item, draw.randint(-1, 3)),
            "remove": (item,),
            "use_coupon": (code,),
            "pay": (),
            "cancel": (order,),
        }
        name = draw.choice(list(calls))
        with contextlib.suppress(ToolError):
            getattr(state, name)(*calls[name])
        assert (worth(state), stock(state)) == before
        assert state.wallet >= 0
        assert min(i["stock"] for i in state.items.values()) >= 0


def test_a_state_is_what_was_seen_cart_coupon_and_orders_however_they_came_about() -> None:
    task = shop(0, 0)
    start = read_shop(str(task.extra["start"]))
    (one, two), code = list(start.items)[:2], next(iter(start.coupons))

    def last(*calls: tuple[str, dict[str, object]]) -> str | None:
        return play(task, [write_call("hermes", name, arguments) for name, arguments in calls])[-2].state

    put, browse = [("add", {"item": id}) for id in (one, two)], ("browse", {"kind": "mug"})
    held = last(*put)
    assert held is not None
    assert last(*reversed(put)) == held
    longer = last(*put, put[0], ("remove", {"item": one}))
    assert last(("view", {}), *put, ("cancel", {"order": "none"})) == longer, "looking and failing change nothing"
    ends = [put[0], browse, ("use_coupon", {"code": code}), ("pay", {}), ("view", {})]
    assert len({last(*put, end) for end in ends}) == 5


def test_a_shop_of_which_all_was_seen_is_not_in_the_state_of_one_where_nothing_was() -> None:
    task = shop(0, 0)
    kind, other = sorted({item["kind"] for item in read_shop(str(task.extra["start"])).items.values()})[:2]

    def after(*wanted: str) -> str | None:
        return play(task, [write_call("hermes", "browse", {"kind": kind}) for kind in wanted])[-2].state

    nothing = after("unicorn")
    assert len({nothing, after(""), after(kind), after(other)}) == 4
    assert after("dragon") == nothing, "no kind of theirs was seen"
    assert after(kind, other) == after(other, kind) != after(other, other)
    assert after("", kind) == after(kind, "") == after("", "unicorn"), "what was seen stays known"


def test_episodes_share_no_state() -> None:
    task = shop(0, 0)
    look = [write_call("hermes", "view", {}), write_call("hermes", "browse", {})]
    asyncio.run(check_isolation_of_episodes(open_shop, task, said=look, other=solution(task)))


def test_a_shop_that_leaks_between_episodes_would_be_seen() -> None:
    task = shop(0, 0)
    shared = read_shop(str(task.extra["start"]))

    class Leaky(ShopEnv):
        def _open(self, task: Task, seed: int) -> list[Tool]:
            self._shop = shared
            return [make_tool(getattr(shared, name), effect=effect) for name, effect in ACTIONS.items()]

    look = [write_call("hermes", "view", {})]
    with pytest.raises(UserError, match="leaks"):
        asyncio.run(check_isolation_of_episodes(lambda: open_shop(Leaky), task, said=look, other=solution(task)))


def test_equal_seeds_give_equal_tasks_the_goal_is_never_the_start_and_nothing_of_it_is_told() -> None:
    assert shop(4, 2) == shop(4, 2)
    assert len({shop(index, 0).messages for index in range(200)}) == 200
    for index in range(600):
        task = shop(index, 0, items=3, max_wishes=3)
        start, goal = (read_shop(str(task.extra[name])) for name in ("start", "goal"))
        assert judge(start, start, goal, 0.25) == 0.0
        assert judge(start, goal, goal, 0.25) == 1.0
        assert read_shop(write_shop(goal)) == goal
        assert "i1" not in task.messages[0].content.split()


def test_wrong_options_and_foreign_tasks_are_refused() -> None:
    with pytest.raises(UserError):
        shop(0, 0, items=1)
    with pytest.raises(UserError):
        ShopEnv(mistake_cost=-1.0)
    with pytest.raises(TaskError, match="generator"):
        asyncio.run(ShopEnv().start(Task(id="x", messages=(Message(role="user", content="?"),)), 0))
    assert Shop(items={}, coupons={}, wallet=0).browse() == "nothing; kinds are "


def test_a_demonstration_is_a_right_visit_in_the_very_words_of_the_shop() -> None:
    assert GENERATORS["shop_demo"] is shop_demo
    for index in range(40):
        task = shop_demo(index, 1, items=6, max_wishes=2)
        said = [message.content for message in task.messages if message.role == "assistant"]
        replies = play(task, said, call_format="plain", show_tools="no")
        assert [message for reply in replies for message in reply.messages] == [
            message for message in task.messages if message.role == "tool"
        ]
        assert (replies[-1].reward, task.answer, task.extra["trained_turns"]) == (1.0, "done", "all")
        adds = [place for place, call in enumerate(said) if call.startswith("add(")]
        assert all(said[place - 1].startswith("browse(") for place in adds), "an id is looked up before it is used"


def test_output_is_marked_as_untrusted_unless_the_model_was_taught_the_plain_words() -> None:
    task = shop(0, 1)
    look = {name: write_call(name, "browse", {"kind": ""}) for name in ("hermes", "plain")}
    for call_format, show_tools, is_marked in (("hermes", "no", True), ("plain", "text", True), ("plain", "no", False)):
        reply = play(task, [look[call_format]], call_format=call_format, show_tools=show_tools)[0]
        assert ("no instructions" in reply.messages[0].content) == is_marked


def test_a_brief_shop_says_the_same_in_few_words_and_calls_items_by_name() -> None:
    for index in range(40):
        brief, long = (shop_demo(index, 1, items=4, max_wishes=1, brief=is_brief) for is_brief in (True, False))
        sizes = [sum(len(said.content) for said in demo.messages) for demo in (brief, long)]
        assert sizes[0] < 0.8 * sizes[1]
        task = shop(index, 1, items=4, max_wishes=1, brief=True)
        said = [message.content for message in brief.messages if message.role == "assistant"]
        assert paid(task, said, call_format="plain", show_tools="no") == 1.0
        shown = [reply.messages[0].content for reply in play(task, said, call_format="plain", show_tools="no")[:-1]]
        assert shown == [message.content for message in brief.messages if message.role == "tool"]
        assert "i1" not in "".join(shown)
    assert len({shop(index, 1, items=4, max_wishes=1, brief=True).messages for index in range(200)}) > 190


@pytest.mark.parametrize("max_count", [1, 3])
def test_as_many_are_wished_for_as_may_be_and_one_needs_no_number(max_count: int) -> None:
    counts = set()
    for index in range(40):
        task, demo = (make(index, 1, max_count=max_count, brief=True) for make in (shop, shop_demo))
        said = [message.content for message in demo.messages if message.role == "assistant"]
        assert paid(task, said, call_format="plain", show_tools="no") == 1.0
        counts |= {call[1].get("count") for call in json.loads(str(task.extra["solution"])) if call[0] == "add"}
    assert counts == ({None} if max_count == 1 else {1, 2, 3})
    with pytest.raises(UserError, match="max_count=4 in 1 to 3"):
        shop(0, 1, max_count=4)
