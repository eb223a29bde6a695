"""A small web shop: browse, fill a cart, use a coupon, pay, cancel. The final state is judged, never the words.

Owns: environment "shop", generators "shop" and "shop_demo", the shop's rules. Refuses: state that outlives an episode;
each one starts from the snapshot in its task.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from temper.envs.permissions import Permissions
from temper.envs.tool_calls import Calls, write_call
from temper.envs.tool_env import Presentation, ToolEnv, ToolLimits
from temper.envs.tools import Effect, Tool, ToolError, make_tool
from temper.errors import TaskError, UserError
from temper.types import Message, Task

KINDS = ("mug", "lamp", "bowl", "scarf", "notebook", "kettle")
COLOURS = ("blue", "red", "green", "white", "black")
ACTIONS: dict[str, Effect] = {
    "browse": "read",
    "view": "read",
    "add": "write",
    "remove": "write",
    "use_coupon": "write",
    "cancel": "write",
    "pay": "irreversible",
}
"""Methods of Shop that a policy may call."""


@dataclass(slots=True)
class Shop:
    """Everything an episode can change. Money is in whole cents."""

    items: dict[str, dict[str, Any]]
    """By id: kind, colour, price, stock."""
    coupons: dict[str, int]
    """Per cent off, by code; each is good for one order."""
    wallet: int
    cart: dict[str, int] = field(default_factory=dict)
    coupon: str = ""
    orders: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By id: items, paid, coupon, is_cancelled."""
    is_brief: bool = False
    """Prompt and answers in few words, for models that read character by character."""
    seen: list[str] = field(default_factory=list)
    """Kinds of the items that browse() has shown, item by item: what was seen stays known."""

    def browse(self, kind: str = "") -> str:
        """Lists the items on sale.

        kind: only items of this kind, e.g. mug
        """
        wanted = kind.strip().lower().removesuffix("s")
        shown = {id: item for id, item in self.items.items() if wanted in ("", item["kind"])}
        self.seen.extend(item["kind"] for item in shown.values())  # calls that only read run side by side
        line = _brief_line if self.is_brief else _line
        return (
            "\n".join(line(id, item) for id, item in shown.items())
            or f"nothing; kinds are {', '.join(sorted({i['kind'] for i in self.items.values()}))}"
        )

    def view(self) -> str:
        """Shows the cart, the orders and the money left."""
        orders = (
            f"{id}: {_counted(o['items'])}, {_money(o['paid'])}{', cancelled' if o['is_cancelled'] else ''}"
            for id, o in self.orders.items()
        )
        return "\n".join((self._cart(), f"wallet: {_money(self.wallet)}", *orders))

    def add(self, item: str, count: int = 1) -> str:
        """Puts an item into the cart.

        item: its id
        count: how many
        """
        self._require(item, count)
        if self.cart.get(item, 0) + count > self.items[item]["stock"]:
            raise ToolError(f"only {self.items[item]['stock']} of {item} are in stock")
        self.cart[item] = self.cart.get(item, 0) + count
        return self._cart()

    def remove(self, item: str, count: int = 1) -> str:
        """Takes an item out of the cart.

        item: its id
        count: how many
        """
        self._require(item, count)
        if self.cart.get(item, 0) < count:
            raise ToolError(f"the cart has {self.cart.get(item, 0)} of {item}")
        self.cart[item] -= count
        self.cart = {id: held for id, held in self.cart.items() if held}
        return self._cart()

    def use_coupon(self, code: str) -> str:
        """Uses a coupon for the cart.

        code: as written on the coupon
        """
        if code not in self.coupons or any(o["coupon"] == code for o in self.orders.values() if not o["is_cancelled"]):
            raise ToolError(f"coupon {code!r:.40} is unknown or used")
        self.coupon = code
        return f"{self.coupons[code]}% off, {_money(self.total)}"

    def pay(self) -> str:
        """Pays for the cart. This cannot be undone."""
        if not self.cart:
            raise ToolError("the cart is empty")
        if self.total > self.wallet:
            raise ToolError(f"the cart costs {_money(self.total)}, the wallet has {_money(self.wallet)}")
        id = f"o{len(self.orders) + 1}"
        self.orders[id] = {"items": self.cart, "paid": self.total, "coupon": self.coupon, "is_cancelled": False}
        self.wallet -= self.total
        for item, count in self.cart.items():
            self.items[item]["stock"] -= count
        self.cart, self.coupon = {}, ""
        return "paid" if self.is_brief else f"order {id} is paid, wallet: {_money(self.wallet)}"

    def cancel(self, order: str) -> str:
        """Cancels an order; the money comes back.

        order: its id
        """
        found = self.orders.get(order)
        if found is None or found["is_cancelled"]:
            raise ToolError(f"there is no open order {order!r:.40}")
        found["is_cancelled"] = True
        self.wallet += found["paid"]
        for item, count in found["items"].items():
            self.items[item]["stock"] += count
        return "cancelled" if self.is_brief else f"order {order} is cancelled, wallet: {_money(self.wallet)}"

    @property
    def total(self) -> int:
        """Price of the cart, coupon included."""
        full = sum(self.items[item]["price"] * count for item, count in self.cart.items())
        return full - full * self.coupons.get(self.coupon, 0) // 100

    @property
    def bought(self) -> Counter[str]:
        """Items of open orders."""
        return sum((Counter(o["items"]) for o in self.orders.values() if not o["is_cancelled"]), Counter[str]())

    def _cart(self) -> str:
        return f"cart: {_counted(self.cart)}, {_money(self.total)}"

    def _require(self, item: str, count: int) -> None:
        if item not in self.items:
            raise ToolError(f"there is no item {item!r:.40}; browse() gives ids")
        if count < 1:
            raise ToolError(f"count={count} must be at least 1")


def judge(start: Shop, end: Shop, goal: Shop, mistake_cost: float) -> float:
    """1 when items bought, money left and cart are the goal's, else 0; each wrong purchase costs, cancelled or not."""
    placed = [order for id, order in end.orders.items() if id not in start.orders]
    mistakes = sum(bool(Counter(order["items"]) - goal.bought) for order in placed)
    is_reached = (end.bought, end.wallet, end.cart) == (goal.bought, goal.wallet, goal.cart)
    return max(float(is_reached) - mistake_cost * mistakes, -1.0)


def shop(
    index: int, seed: int, *, items: int = 8, max_wishes: int = 2, max_count: int = 3, brief: bool = False
) -> Task:
    """A shop and what to do there: buy a named item or the cheapest of its kind, use a coupon, cancel an order.

    The goal is the state after the calls in extra "solution", so that every task can be solved. max_count: of each item
    that is wished for. brief: in few words and with items called by name, for models that read character by character.
    """
    if not 2 <= items <= len(KINDS) * len(COLOURS) or not 1 <= max_wishes <= 3 or not 1 <= max_count <= 3:
        raise UserError(
            f"items={items} must lie in 2 to 30, max_wishes={max_wishes} and max_count={max_count} in 1 to 3."
        )
    draw = random.Random(f"shop/{seed}/{index}")
    start = _stocked(items, draw, brief)
    told, calls = _wishes(start, max_wishes, max_count, draw)
    wishes = "; ".join(told)
    goal = read_shop(write_shop(start))
    for name, arguments in calls:
        getattr(goal, name)(**arguments)
    # The sum makes prompts differ where shops do: tasks with equal prompts are taken for one and the same.
    prompt = f"You have {_money(start.wallet)}. In the shop, {wishes}. Buy nothing else. Say done at the end."
    if brief:
        prompt = f"{_money(start.wallet)}: {wishes}"
    return Task(
        id=f"shop:{seed}:{index}",
        messages=(Message(role="user", content=prompt),),
        env="shop",
        extra={"start": write_shop(start), "goal": write_shop(goal), "solution": json.dumps(calls)},
    )


def shop_demo(
    index: int,
    seed: int,
    *,
    items: int = 8,
    max_wishes: int = 2,
    max_count: int = 3,
    brief: bool = False,
    call_format: str = "plain",
) -> Task:
    """A whole right episode to imitate: it browses for the kind before it adds an item, pays, and says done.

    The words between are those of an env with call_format = "plain", show_tools = "no". All its turns are trained.
    """
    task = shop(index, seed, items=items, max_wishes=max_wishes, max_count=max_count, brief=brief)
    visited = read_shop(str(task.extra["start"]))
    said = list(task.messages)
    for name, arguments in json.loads(str(task.extra["solution"])):
        looks = [("browse", {"kind": visited.items[arguments["item"]]["kind"]})] if name == "add" else []
        for tool, given in (*looks, (name, arguments)):
            said.append(Message(role="assistant", content=write_call(call_format, tool, given)))
            said.append(Message(role="tool", content=getattr(visited, tool)(**given), name=tool))
    extra = {**task.extra, "trained_turns": "all"}
    return Task(id=f"shop_demo:{seed}:{index}", messages=tuple(said), env="shop", answer="done", extra=extra)


def _stocked(items: int, draw: random.Random, is_brief: bool) -> Shop:
    """Prices are all different, so that the cheapest is one item. In a brief shop an item's name is its id."""
    names = draw.sample([(kind, colour) for kind in KINDS for colour in COLOURS], items)
    prices = draw.sample(range(300, 4000, 20), items)
    shelf = {
        f"{colour} {kind}" if is_brief else f"i{number}": {
            "kind": kind,
            "colour": colour,
            "price": price,
            "stock": draw.randint(4, 9),
        }
        for number, ((kind, colour), price) in enumerate(zip(names, prices, strict=True), start=1)
    }
    codes = draw.sample(("SPRING", "HARVEST", "LANTERN", "COMET", "WILLOW"), 2)
    return Shop(
        items=shelf,
        coupons={code: draw.choice((10, 20, 25)) for code in codes},
        wallet=draw.randint(50_000, 99_999),
        is_brief=is_brief,
    )


def _wishes(shop: Shop, max_wishes: int, max_count: int, draw: random.Random) -> tuple[list[str], Calls]:
    """In words, and as the calls that fulfil them. May place an order to be cancelled."""
    wishes, calls = list[str](), Calls()
    kinds = sorted({item["kind"] for item in shop.items.values()})
    kinds = draw.sample(kinds, k=min(len(kinds), draw.randint(1, max_wishes)))
    # The order is of another kind than what is wished for: else to keep it and do nothing would reach the goal.
    unwanted = [id for id, item in shop.items.items() if item["kind"] not in kinds]
    if unwanted and draw.random() < 0.3:
        shop.add(draw.choice(unwanted))
        shop.pay()
        wishes.append("cancel order o1")
        calls.append(("cancel", {"order": "o1"}))
    for kind in kinds:
        of_kind = [id for id, item in shop.items.items() if item["kind"] == kind]
        item, count = min(of_kind, key=lambda id: shop.items[id]["price"]), draw.randint(1, max_count)
        what = f"the cheapest {kind}"
        if draw.random() < 0.5:
            item = draw.choice(of_kind)
            what = f"the {shop.items[item]['colour']} {kind}"
        if max_count == 1:
            wishes.append(f"buy {what}")
            calls.append(("add", {"item": item}))
        else:
            wishes.append(f"buy {count} of {what}")
            calls.append(("add", {"item": item, "count": count}))
    if draw.random() < 0.5:
        code = draw.choice(list(shop.coupons))
        wishes.append(f"use coupon {code}")
        calls.append(("use_coupon", {"code": code}))
    return wishes, [*calls, ("pay", {})]


class ShopEnv(ToolEnv):
    """One visit. At its end the state is compared with the goal; see judge().

    Payments cannot be undone: the recipe allows them, env.allow = ["pay"], or they are only described.
    """

    def __init__(
        self,
        *,
        max_calls: int = 16,
        mistake_cost: float = 0.25,
        call_format: str = "auto",
        show_tools: str = "auto",
    ) -> None:
        if mistake_cost < 0:
            raise UserError(f'env "shop": mistake_cost={mistake_cost} must not be below 0.')
        self._mistake_cost = mistake_cost
        super().__init__(
            self._open,
            limits=ToolLimits(calls_per_episode=max_calls),
            permissions=Permissions(effects=frozenset({"read", "write"})),
            # A small model that was taught the shop's words by heart sees them without the marks of untrusted output.
            presentation=Presentation(
                call_format=call_format,
                show_tools=show_tools,
                mark_untrusted=(call_format, show_tools) != ("plain", "no"),
            ),
        )

    def reward(self, answer: str) -> float | None:
        return judge(self._start, self._shop, self._goal, self._mistake_cost)

    def state(self) -> str:
        """Kinds seen, cart, coupon and orders: the rest follows from them."""
        shop = self._shop
        return json.dumps((sorted(set(shop.seen)), shop.cart, shop.coupon, shop.orders), sort_keys=True)

    def _open(self, task: Task, seed: int) -> Iterable[Tool]:
        try:
            self._start, self._shop = (read_shop(str(task.extra["start"])) for _ in range(2))
            self._goal = read_shop(str(task.extra["goal"]))
        except (KeyError, TypeError, ValueError) as error:
            raise TaskError(f'task {task.id} does not come from the generator "shop": {error}') from error
        return [make_tool(getattr(self._shop, name), effect=effect) for name, effect in ACTIONS.items()]


def write_shop(shop: Shop) -> str:
    return json.dumps(asdict(shop))


def read_shop(text: str) -> Shop:
    return Shop(**json.loads(text))


def _line(id: str, item: dict[str, Any]) -> str:
    return f"{id}: {item['colour']} {item['kind']}, {_money(item['price'])}, {item['stock']} in stock"


def _brief_line(id: str, item: dict[str, Any]) -> str:
    return f"{id} {_money(item['price'])}"


def _counted(items: dict[str, int]) -> str:
    return ", ".join(f"{count} x {item}" for item, count in items.items()) or "empty"


def _money(cents: int) -> str:
    return f"${cents // 100}.{cents % 100:02d}"
