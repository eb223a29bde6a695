"""Which language a text is in, told from its script and its commonest words; and the reward for staying in one.

Owns: kind "language" and the profiles. Refuses: fine distinctions; a text without common words is told by script alone.
"""
# ruff: noqa: RUF001 - letters of other scripts are what this file is about

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

from temper.errors import UserError, did_you_mean
from temper.protocols import Reward
from temper.types import Score, Task, Trajectory

SCRIPTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("en", "de", "fr", "es", "it", "pt", "nl", "sv", "fi", "pl", "tr", "vi", "sw", "id"), ("LATIN",)),
    **dict.fromkeys(("ru", "bg", "uk"), ("CYRILLIC",)),
    **dict.fromkeys(("ar", "fa", "ur"), ("ARABIC",)),
    **dict.fromkeys(("hi", "mr", "ne"), ("DEVANAGARI",)),
    "bn": ("BENGALI",),
    "el": ("GREEK",),
    "gu": ("GUJARATI",),
    "he": ("HEBREW",),
    "ja": ("HIRAGANA", "KATAKANA", "CJK"),
    "kn": ("KANNADA",),
    "ko": ("HANGUL",),
    "ml": ("MALAYALAM",),
    "pa": ("GURMUKHI",),
    "ta": ("TAMIL",),
    "te": ("TELUGU",),
    "th": ("THAI",),
    "zh": ("CJK",),
}
"""Languages by code, and the scripts they are written in, as Unicode names begin."""

STOP_WORDS: dict[str, str] = {
    "en": "the of and to in is that it was for you with are this have not be on as at by from they we which what or an",
    "de": "der die das und ist nicht ein eine zu den mit von auf für im sich dem des auch es wird sind wie ich oder",
    "fr": "le la les et est des une un du que pour dans qui pas sur avec ce il au plus sont vous nous par cette ou",
    "es": "el la los las y es de que en un una por con para no se del su al lo como más pero sus este son está o",
    "it": "il la di che e è un una per non con del della sono le gli i nel si da come alla questo più anche lo ma",
    "pt": "o a os as e é de que em um uma para com não do da no na se por mais dos das como ao mas você são ou",
    "nl": "de het een en van is dat niet in op te voor met zijn aan er die ook als maar door wordt bij naar ik je",
    "sv": "och att det som en är på för med av inte den till ett har om jag de så kan men var vi från eller du",
    "fi": "ja on ei se että oli hän ovat mutta kun tai niin myös joka ole kuin sen minä sinä tämä voi jos mitä siitä",
    "pl": "i w na z się nie do jest to że jak od po przez dla są oraz ale tym być o ten co czy już lub przy",
    "tr": "ve bir bu için ile de da çok olarak daha olan gibi kadar ne var ama en sonra mi değil ben o her ya",
    "vi": "và là của có không được cho một các trong người với những này để khi đã như từ về tôi bạn rất cũng nhiều",
    "sw": "na ya wa kwa ni katika la za kuwa cha hii hiyo yake kama lakini pia au sana wao yetu huo watu moja mimi",
    "id": "yang dan di ini itu dengan untuk dari tidak dalam pada adalah akan juga saya kami atau ke oleh bisa ada",
    "ru": "и в не на что с это по как но он из за то к от для у вы или все его я мы так было бы быть был",
    "bg": "и на да се за от не че са това като по ще има но с или най много които със си към при съм е в ви",
    "uk": "і в не на що з це та як але до від для у або ми ви їх його є було бути після який також",
    "ar": "في من على إلى أن هذا التي الذي عن مع هذه كان لا ما هو هي كل بعد قد ذلك أو ثم لم بين إن",
    "fa": "و در به از که این را با است برای آن یک خود تا کرد بر هم نیز می شود های ها اما شما من بود",
    "ur": "کے کی میں ہے اور سے کا کو یہ پر نے کہ ہیں ایک بھی اس وہ نہیں تھا کر لئے لیے گیا ہو آپ",
    "hi": "के में है और की से का को यह पर ने कि हैं एक भी इस वह नहीं था कर लिए हो आप साथ जो",
    "mr": "आणि आहे या ते हे तो ही व की आहेत नाही मध्ये साठी एक करण्यासाठी होते असे तर होता म्हणून पण त्या माझ्या मी आपण",
    "ne": "र छ मा को का यो पनि हो गर्न भने लागि छन् एक गरेको तथा हुन्छ त्यो थियो म हामी तपाईं छैन गर्ने भएको लाई",
}  # fmt: skip
_PROFILES = {language: frozenset(words.split()) for language, words in STOP_WORDS.items()}
_COMMAND = re.compile(r"\\[A-Za-z]+")  # LaTeX is not a language of people


@functools.lru_cache(maxsize=65536)
def script_of(character: str) -> str:
    """LATIN, CYRILLIC, CJK ...; '' for what is not a letter."""
    if not unicodedata.category(character).startswith(("L", "M")):
        return ""
    first = unicodedata.name(character, "").partition(" ")[0]
    # Marks such as COMBINING ACUTE ACCENT belong to the letter before them.
    return (
        ""
        if first in ("COMBINING", "MODIFIER", "")
        else {"FULLWIDTH": "LATIN", "HALFWIDTH": "KATAKANA"}.get(first, first)
    )


def count_scripts(text: str) -> Counter[str]:
    """Letters by script, without LaTeX commands."""
    counts = Counter(map(script_of, _COMMAND.sub(" ", text)))
    del counts[""]
    return counts


def detect_language(text: str) -> str | None:
    """The likeliest language, or None when the script does not tell and no profile fits."""
    counts = count_scripts(text)
    if not counts:
        return None
    if counts["HIRAGANA"] + counts["KATAKANA"] > 0.1 * counts.total():
        return "ja"
    script = counts.most_common(1)[0][0]
    languages = [language for language, scripts in SCRIPTS.items() if script in scripts and language != "ja"]
    if len(languages) < 2:
        return languages[0] if languages else None
    hits = _hits(text, languages)
    best = max(hits, key=lambda language: hits[language])
    return best if hits[best] else None


def _hits(text: str, languages: Iterable[str]) -> dict[str, int]:
    """How often the commonest words of each language occur."""
    cleaned = "".join(c if script_of(c) or unicodedata.category(c).startswith("M") else " " for c in text)
    words = Counter(cleaned.casefold().split())
    return {language: sum(words[word] for word in _PROFILES[language]) for language in languages}


def consistency(text: str, language: str) -> float:
    """Share of letters in the scripts of that language; 0 when the words are clearly of another one."""
    counts = count_scripts(text)
    share = sum(counts[script] for script in SCRIPTS[language]) / max(counts.total(), 1)
    if language in _PROFILES and (detected := detect_language(text)) in _PROFILES and detected != language:
        hits = _hits(text, (language, detected))
        # Languages share short words; one of them proves nothing.
        if hits[detected] >= hits[language] + 2:
            return 0.0
    return share


class LanguageReward(Reward):
    """How much of the response is in the language asked for, from 0 to 1; without one, in the language of the prompt.

    A prompt whose language cannot be told is unscorable. A response without words is 0: none of it is in any language.
    """

    name = "language"

    def __init__(self, *, language: str = "") -> None:
        if language and language not in SCRIPTS:
            known = ", ".join(sorted(SCRIPTS))
            raise UserError(
                f'reward "language": language="{language}" is unknown.{did_you_mean(language, SCRIPTS)} Known: {known}.'
            )
        self._language = language

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        language = self._language or detect_language(_prompt(task))
        if language is None:
            return Score.unscorable("the language of the prompt cannot be told")
        if not count_scripts(trajectory.text):
            return Score.of(0.0, "the response has no words")
        return Score.of(consistency(trajectory.text, language))


def _prompt(task: Task) -> str:
    return next((message.content for message in reversed(task.messages) if message.role == "user"), "")
