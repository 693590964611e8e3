"""Where text is cut for speech, that the pieces it came in do not matter, and what is never spoken."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ray.models.voice_chat.clauses import (
    FIRST_CAP_WORDS,
    FIRST_CUT_WORDS,
    MAX_CHARS,
    ClauseSplitter,
    speakable,
)


def clauses(*pieces: str) -> list[str]:
    splitter = ClauseSplitter()
    return [clause for piece in pieces for clause in splitter.push(piece)] + splitter.finish()


words = st.sampled_from(
    [
        "the",
        "capital",
        "Dr.",
        "e.g.",
        "U.S.",
        "3.14",
        "No.",
        "5",
        "Paris",
        "and",
        "I",
        "[a",
        "b](http://x.y/z)",
        "**Go**",
    ]
)
marks = st.sampled_from(
    [" ", " ", " ", " ", ", ", ". ", "! ", '." ', "...  ", ": ", "\n", " \n\n- ", ".) ", "… ", "\t", ""]
)
prose = st.lists(st.tuples(words, marks), max_size=60).map(lambda parts: "".join(w + m for w, m in parts))
anything = st.one_of(prose, st.text(max_size=400), st.text(alphabet="a .,!\n\"'[])", max_size=700))


@settings(max_examples=250, deadline=None)
@given(text=anything, cuts=st.lists(st.integers(0, 700), max_size=12))
def test_the_plan_depends_on_the_whole_text_only(text: str, cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = clauses(text)
    assert clauses(*(text[a:b] for a, b in pairwise(borders))) == whole
    assert clauses(*text) == whole
    assert re.sub(r"\s", "", "".join(whole)) == re.sub(r"\s", "", text)  # nothing lost, nothing added
    for clause in whole:
        body = clause.removesuffix("\n")
        assert body.strip() == body
        assert 0 < len(body) <= MAX_CHARS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The capital of France is Paris.", ["The capital of France is Paris."]),
        (
            "The capital of France, as you may well know by now, is Paris. It lies on the Seine.",
            ["The capital of France,", "as you may well know by now, is Paris.", "It lies on the Seine."],
        ),
        (
            "Photosynthesis is the process that plants and algae use in order to turn light into sugar. Good.",
            ["Photosynthesis is the process that plants", "and algae use in order to turn light into sugar.", "Good."],
        ),
        ("Sure! I can help you with that. What is it?", ["Sure! I can help you with that.", "What is it?"]),
        ("Ask Dr. Smith or J. K. Rowling. They know.", ["Ask Dr. Smith or J. K. Rowling.", "They know."]),
        ("It costs 3.14 dollars in the U.S. Today too.", ["It costs 3.14 dollars in the U.S. Today too."]),
        ("See No. 5 there. He said no. We went on.", ["See No. 5 there.", "He said no.", "We went on."]),
        ('He said "Go away!" Then he left.', ['He said "Go away!"', "Then he left."]),
        ('"Go away!" he said. Then he left.', ['"Go away!" he said.', "Then he left."]),
        ("Two things:\n\n1. Red apples\n2. Green pears\n", ["Two things:\n", "1. Red apples\n", "2. Green pears\n"]),
        (
            "Please read [this, it is good](http://a.b/c) now. Yes it is.",
            ["Please read [this, it is good](http://a.b/c) now.", "Yes it is."],
        ),
        ("Here are some facts:\n- One\n", ["Here are some facts:\n", "- One\n"]),
        ("", []),
        (" \n\t ", []),
    ],
)
def test_examples(text: str, expected: list[str]) -> None:
    assert clauses(text) == expected


def test_a_clause_leaves_as_soon_as_it_is_certain() -> None:
    splitter = ClauseSplitter()
    assert splitter.push("The capital of France is Paris.") == []
    assert splitter.push(" ") == []  # "is Paris. and so on" would go on
    assert splitter.push("It") == ["The capital of France is Paris."]
    assert splitter.push(" lies\n") == ["It lies\n"]
    assert splitter.finish() == []


def test_a_long_first_clause_is_cut_at_a_word_and_later_ones_are_bounded() -> None:
    plain = " ".join(["word"] * 200)
    first, *later = clauses(plain)
    assert len(first.split()) == FIRST_CUT_WORDS[1]
    assert all(MAX_CHARS - 10 < len(clause) <= MAX_CHARS for clause in later[:-1])
    short = " ".join(["word"] * FIRST_CAP_WORDS)
    assert clauses(short) == [short]
    assert [len(clause) for clause in clauses("x" * 700)] == [300, 300, 100]


def test_a_word_cut_never_follows_an_abbreviation() -> None:
    first = clauses("one two three four five six seven Dr. Smith ten eleven twelve")[0]
    assert first == "one two three four five six seven"


def test_long_later_sentences_are_cut_at_a_comma() -> None:
    late = "Here we go. Word " + "word " * 4 + "word, " + "word " * 12 + "word, and that was the end of it."
    assert clauses(late) == [
        "Here we go.",
        "Word " + "word " * 4 + "word, " + "word " * 12 + "word,",
        "and that was the end of it.",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("**Paris** is _very_ `old`.", "Paris is very old."),
        ("## The *big* question", "The big question"),
        ("- [x] milk\n* eggs\n> said", "milk\neggs\nsaid"),
        ("Read [the docs](https://a.b/c?d=e) or https://x.y/z.", "Read the docs or."),
        ("![a cat](cat.png) and (www.cats.org) <https://a.b>", "a cat and"),
        ("I ❤️ you 👩‍👩‍👧 so much 😀!", "I you so much!"),
        ("snake_case and __init__ and 2 * 3", "snake case and init and 2 times 3"),
        ("a\x00b\x1b[0m c\u200bd\u202e", "ab0m cd"),
        ("```python\nprint\n```", "print"),
        ("Bye.<|im_end|>", "Bye."),
        ("line<br>break | cell", "line break cell"),
        ("It is 20 °C, isn\u2019t it?", "It is 20 °C, isn\u2019t it?"),
        ("a < b & c > d, 5 % + $3", "a < b & c > d, 5 % + $3"),
        ("!!!", ""),
        ("😀", ""),
        ("---", ""),
        ("https://a.b/c", ""),
        ("", ""),
    ],
)
def test_speakable(text: str, expected: str) -> None:
    assert speakable(text) == expected


@settings(max_examples=150, deadline=None)
@given(text=anything)
def test_nothing_unspeakable_is_left(text: str) -> None:
    spoken = speakable(text)
    assert not set(spoken) & set("*_`#|\\[]{}\x00\u200b")
    assert spoken == "" or any(char.isalnum() for char in spoken)
    assert "  " not in spoken
