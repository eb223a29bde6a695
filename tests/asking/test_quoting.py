from __future__ import annotations

from temper.asking.quoting import quote


def test_a_key_that_crosses_the_cut_leaves_nothing_behind() -> None:
    for place in range(30):
        said = quote("." * place + "secret" + "!" * 40, ["secret"], 20)
        assert "secr" not in said.replace("[key]", "")
        assert said.startswith(("." * place + "[key]")[:20])


def test_of_keys_that_hold_each_other_the_longest_is_taken_out() -> None:
    assert quote("abcd abc", ["abc", "", "abcd"], 50) == "[key] [key]"


def test_what_is_cut_says_so_and_the_rest_stays_as_it_is() -> None:
    assert quote("short", ["key"], 5) == "short"
    assert quote("longer", [], 5) == "longe..."


def test_nothing_that_a_terminal_obeys_is_kept() -> None:
    assert quote("a\x1b[2J\r\nb", [], 50) == "a [2J  b"
