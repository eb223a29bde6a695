"""What a reader sees of a text: without characters that show nothing, and with look-alike letters told.

Owns: which characters are invisible, and which letter of the alphabet a look-alike passes for. Refuses: what follows
from it; each reward says that itself. A policy that is paid for form learns to fill it with what nobody sees.
"""

# ruff: noqa: RUF001 - letters of other scripts are what this file is about

from __future__ import annotations

import re
import unicodedata

# Unicode's Default_Ignorable_Code_Point, controls other than space, blanks that are not spaces (Braille, Hangul, a note
# without a head), tags, variation selectors, half surrogates and private characters.
_NEVER_SHOWN = (
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f"
    "\u202a-\u202e\u2060-\u206f\u2800\u3164\ud800-\udfff\ue000-\uf8ff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d159\U0001d173-\U0001d17a\U000e0000-\U0010ffff"
)
_JOINERS = "\u200c\u200d"
_HIDDEN = re.compile(f"[{_NEVER_SHOWN}{_JOINERS}]+")

_ALIKE = """
aаαɑ bƅЬ cсϲᴄ dԁɗ eеєҽε fƒ gɡց hһհ iіıιɩ jјϳ kкκ lӏⅼǀ mмⅿ nոηп oоοσօᴏ pрρ qԛ rгᴦ sѕꜱ tтτ uυսцᴜ vѵνᴠ wԝωᴡ xхχ yуүγʏ zᴢ
AАΑ BВΒ CСϹ DᎠ EЕΕ FϜ GԌ HНΗ IІΙӀ JЈ KКΚ LᏞ MМΜ NΝ OОΟ PРΡ QԚ RᎡ SЅ TТΤ UՍ VѴ WԜ XХΧ YҮΥ ZΖ
"""
_LOOKALIKES = {ord(character): group[0] for group in _ALIKE.split() for character in group[1:]}
"""Letters of other alphabets, and styled ones that Unicode's compatible forms leave as they are, to the Latin letter
that they are read as."""


def visible(text: str) -> str:
    """The text without characters that show nothing. Joiners stay between two letters of scripts that need them."""
    return _HIDDEN.sub(_keep_joiner, text)


def _keep_joiner(hidden: re.Match[str]) -> str:
    around = hidden.string[hidden.start() - 1 : hidden.start()] + hidden.string[hidden.end() : hidden.end() + 1]
    is_needed = len(hidden[0]) == 1 and hidden[0] in _JOINERS and len(around) == 2
    return hidden[0] if is_needed and not any(map(str.isascii, around)) else ""


def num_visible(text: str) -> int:
    """How many characters of the text show something: letters, digits, signs; neither space nor lone accents."""
    if text.isascii():
        return len("".join(visible(text).split()))
    return sum(not character.isspace() and unicodedata.category(character)[0] != "M" for character in visible(text))


def as_read(text: str) -> str:
    """The text as a reader takes it, for looking words up in it: what is visible, in the plain form of each letter
    (NFKC), without marks that belong to no letter, and in a text that is mostly Latin the look-alikes replaced."""
    text = visible(text)
    if text.isascii():
        return text
    composed = unicodedata.normalize("NFKC", text)
    plain = "".join(character for character in composed if unicodedata.category(character) != "Mn")
    num_latin = sum(character.isascii() and character.isalpha() for character in plain)
    # A text in Russian is read as Russian: "сор" is not "cop" there.
    return plain.translate(_LOOKALIKES) if 2 * num_latin > sum(map(str.isalpha, plain)) else plain
