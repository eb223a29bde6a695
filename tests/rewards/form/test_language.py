# ruff: noqa: RUF001 - letters of other scripts are what this file is about
from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from temper.errors import UserError
from temper.rewards.form.language import SCRIPTS, STOP_WORDS, LanguageReward, consistency, detect_language
from temper.types import Message, Score, ScoreKind, Task, Trajectory

Say = Callable[[str], Trajectory]
TEXTS = {
    "en": "The weather is nice today and we are going to the beach with our friends.",
    "de": "Das Wetter ist heute schön und wir gehen mit unseren Freunden an den Strand.",
    "fr": "Il fait beau aujourd'hui et nous allons à la plage avec des amis pour nager.",
    "es": "Hoy hace buen tiempo y vamos a la playa con los amigos para nadar en el mar.",
    "it": "Oggi il tempo è bello e andiamo alla spiaggia con gli amici per nuotare nel mare.",
    "pt": "Hoje o tempo está bom e vamos para a praia com os amigos, mas não é um dia longo.",
    "nl": "Het weer is vandaag mooi en we gaan met de vrienden naar het strand.",
    "sv": "Det är fint väder i dag och vi ska till stranden med våra vänner som inte är hemma.",
    "fi": "Tänään on kaunis ilma ja me menemme rannalle, mutta se on kaukana ja vesi ei ole lämmin.",
    "vi": "Hôm nay trời đẹp và chúng tôi đi đến bãi biển với những người bạn của tôi.",
    "sw": "Leo hali ya hewa ni nzuri na tunaenda pwani kwa gari na marafiki wa shule.",
    "ru": "Сегодня хорошая погода, и мы идём на пляж с друзьями, но это не так далеко.",
    "bg": "Днес времето е хубаво и ще отидем на плажа с приятели, но това не е далеч.",
    "ar": "الطقس جميل اليوم ونحن ذاهبون إلى الشاطئ مع الأصدقاء في هذا اليوم.",
    "fa": "امروز هوا خوب است و ما با دوستان به ساحل می رویم که این را دوست داریم.",
    "ur": "آج موسم اچھا ہے اور ہم دوستوں کے ساتھ ساحل پر جا رہے ہیں۔",
    "hi": "आज मौसम अच्छा है और हम दोस्तों के साथ समुद्र तट पर जा रहे हैं।",
    "mr": "आज हवामान छान आहे आणि आम्ही मित्रांसोबत समुद्रकिनारी जात आहोत, पण ते दूर आहे.",
    "ne": "आज मौसम राम्रो छ र हामी साथीहरूसँग समुद्र तटमा जाँदैछौं, तर यो टाढा छैन।",
    "bn": "আজ আবহাওয়া সুন্দর এবং আমরা বন্ধুদের সাথে সৈকতে যাচ্ছি।",
    "gu": "આજે હવામાન સારું છે અને અમે મિત્રો સાથે જઈ રહ્યા છીએ.",
    "kn": "ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ ಮತ್ತು ನಾವು ಹೋಗುತ್ತಿದ್ದೇವೆ.",
    "ko": "오늘 날씨가 좋아서 친구들과 해변에 갑니다.",
    "pa": "ਅੱਜ ਮੌਸਮ ਚੰਗਾ ਹੈ ਅਤੇ ਅਸੀਂ ਜਾ ਰਹੇ ਹਾਂ।",
    "ta": "இன்று வானிலை நன்றாக உள்ளது.",
    "te": "ఈ రోజు వాతావరణం బాగుంది.",
    "th": "วันนี้อากาศดีและเราจะไปชายหาด",
    "ja": "今日は天気がいいので、友達と海に行きます。",
    "zh": "今天天气很好，我们和朋友一起去海边。",
}


@pytest.mark.parametrize("language", TEXTS)
def test_each_language_is_told_from_the_others(language: str) -> None:
    assert detect_language(TEXTS[language]) == language
    assert consistency(TEXTS[language], language) > 0.95


@pytest.mark.parametrize(("asked", "written"), [("en", "de"), ("en", "zh"), ("zh", "en"), ("hi", "mr"), ("ar", "fa")])
def test_another_language_scores_nothing(asked: str, written: str) -> None:
    assert consistency(TEXTS[written], asked) == 0.0


def test_every_language_of_a_shared_script_has_its_own_words() -> None:
    shared = [language for language, scripts in SCRIPTS.items() if scripts[0] in ("LATIN", "CYRILLIC", "ARABIC")]
    assert set(shared) <= set(STOP_WORDS)
    assert len({frozenset(words.split()) for words in STOP_WORDS.values()}) == len(STOP_WORDS)


def score(response: Trajectory, prompt: str = "", **options: str) -> Score:
    task = Task(id="t:1", messages=(Message(role="user", content=prompt),))
    return asyncio.run(LanguageReward(**options).score(task, response))


def test_the_prompts_language_is_the_one_to_keep(say: Say) -> None:
    assert score(say(TEXTS["de"]), prompt=TEXTS["de"]) == Score.of(1.0)
    assert score(say(TEXTS["en"]), prompt=TEXTS["de"]) == Score.of(0.0)
    assert score(say(TEXTS["en"]), prompt="1 + 1 = ?").kind is ScoreKind.UNSCORABLE


def test_a_mixture_scores_its_share_and_mathematics_is_no_language(say: Say) -> None:
    half = score(say("今天天气很好 weather"), language="zh")
    assert half.value == pytest.approx(6 / 13)
    assert score(say(TEXTS["zh"] + r" \frac{1}{2} \boxed{42}"), language="zh") == Score.of(1.0)


def test_silence_and_one_right_word_do_not_pay(say: Say) -> None:
    assert score(say("  "), language="en").value == 0.0
    assert score(say("42"), language="en").value == 0.0
    assert score(say("the " + TEXTS["de"]), language="en") == Score.of(0.0)
    assert (score(say("the " + TEXTS["ru"]), language="en").value or 0) < 0.1


def test_an_unknown_language_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match='language="english" is unknown'):
        LanguageReward(language="english")
