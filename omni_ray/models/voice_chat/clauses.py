"""From a stream of text to clauses that can be spoken, one after the other, and what of a clause is spoken at all.

The plan is a pure function of the whole text: a cut is made only once everything its rule looks at has arrived, so the
pieces in which the text came can not matter. Rules are for English, as the voice is.
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import Final

FIRST_WORDS: Final = 3
"""Fewest words of a first clause that ends at a comma: shorter ones are over before the next clause is there."""
FIRST_CAP_WORDS: Final = 10
"""A first clause that has found no end after this many words is cut inside, at a word border."""
FIRST_CUT_WORDS: Final = (5, 8)
"""That cut leaves 5 to 8 words: where the next word starts a phrase, else 8."""
SENTENCE_WORDS: Final = 2
"""Fewest words of a sentence on its own; "Sure!" is spoken together with what follows it."""
LONG_WORDS: Final = 14
"""A later clause of at least this many words may end at a comma."""
MAX_CHARS: Final = 300
"""No clause is longer; about 330 phonemes, and hibari splits sentences above 400."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ABBREVIATIONS: Final = _words(
    "mr mrs ms mx dr prof st sr jr rev hon gen col capt lt sgt maj gov sen rep pres mt ft messrs mmes "
    "eg ie etc vs cf al approx appt dept est inc ltd co corp bros ave blvd rd hwy tel ext "
    "jan feb mar apr jun jul aug sep sept oct nov dec"
)
_NUMBERED: Final = _words("no nos fig figs vol ch sec p pp art eq par ed")
"""Abbreviations only in front of a number ("No. 5"); words or nothing otherwise."""
_PHRASE_STARTS: Final = _words(
    "and but or nor so yet because although though while when where which who whose that if unless until since as "
    "for with without in on at by from to of into over under about after before between through during than is are "
    "was were has have had will would can could should"
)
_SOFT: Final = frozenset(",;:\u2014\u2013")
_CLOSERS: Final = "\"'\u201d\u2019)]}*_`~"
_OPENERS: Final = "\"'\u201c\u2018([{*_`~#"


@dataclass(frozen=True, slots=True)
class Clause:
    """What the talker speaks in one go. ``index`` counts the request's clauses from 0; ``text`` may hold markdown."""

    index: int
    text: str


class ClauseSplitter:
    """Cuts one text, as it arrives, into clauses. One per request."""

    def __init__(self) -> None:
        self._rest = ""
        self._first = True

    def push(self, text: str) -> list[str]:
        """The clauses that are complete now that ``text`` has arrived, without blanks around them.

        One that ends its line keeps the newline: it sounds like the end of a sentence, with or without a period.
        """
        self._rest += text
        return self._take(final=False)

    def finish(self) -> list[str]:
        """The clauses that are left: the text is over."""
        return self._take(final=True)

    def _take(self, final: bool) -> list[str]:
        clauses: list[str] = []
        while True:
            self._rest = self._rest.lstrip()
            cut = _cut(self._rest, self._first, final)
            if cut is None:
                break
            ends_line = self._rest[cut - 1] == "\n"
            clauses.append(self._rest[:cut].rstrip() + ("\n" if ends_line else ""))
            self._rest, self._first = self._rest[cut:], False
        if final and self._rest:
            clauses.append(self._rest.rstrip())
            self._rest = ""
        return clauses


def _cut(text: str, first: bool, final: bool) -> int | None:
    """Where the first clause of ``text`` ends; None if that is not known yet, or, at the end, nowhere before it.

    Scans from the left and stops at the first place whose verdict needs text that has not come: an answer is never
    taken back.
    """
    borders: list[int] = []  # where words end
    brackets = 0
    for i, char in enumerate(text):
        if i >= MAX_CHARS:
            return borders[-1] if borders else MAX_CHARS
        if char == "\n":
            return i + 1
        if char.isspace():
            if not text[i - 1].isspace():
                borders.append(i)
                if first and len(borders) == FIRST_CAP_WORDS and not brackets:
                    return _inside(text, borders)
            continue
        brackets = max(0, brackets + (char == "[") - (char == "]"))
        if char in _SOFT or char in ".!?…":
            end = i + 1
            while end < len(text) and text[end] in _CLOSERS:
                end += 1
            if end == len(text):
                if not final:
                    return None
                continue
            inside = brackets > text.count("]", i, end)  # of a link's text, which has to stay in one piece
            if end > MAX_CHARS or inside or not text[end].isspace():
                continue
            words = len(borders) + 1
            if char in _SOFT:
                if text[end] != "\n" and words >= (FIRST_WORDS if first else LONG_WORDS):
                    return end
                continue
            following = text[end:].lstrip(" \t")
            if not following:
                if not final:
                    return None
                continue
            if words >= SENTENCE_WORDS and _ends_sentence(text, i, following[0]):
                return end
    return None


def _inside(text: str, borders: list[int]) -> int:
    """Where to cut a long first clause without punctuation: in front of a word that starts a phrase."""
    least, most = FIRST_CUT_WORDS
    good = [n for n in range(most, least - 1, -1) if text[borders[n - 1] - 1] != "."] or [most]  # not after "Dr."
    for n in good:
        if text[borders[n - 1] : borders[n]].strip().lower() in _PHRASE_STARTS:
            return borders[n - 1]
    return borders[good[0] - 1]


def _ends_sentence(text: str, at: int, following: str) -> bool:
    """Whether the mark at ``at`` ends a sentence when the next thing to come is ``following``."""
    if following.islower():
        return False
    if text[at] != ".":
        return True
    start = max(text.rfind(blank, 0, at) for blank in (" ", "\t", "\n")) + 1
    word = text[start:at].strip(_OPENERS + _CLOSERS)
    if start == 0 and word.isdigit():
        return False  # "1. First item"
    if len(word) == 1 and word.isalpha() and word.isupper():
        return False  # an initial
    bare = word.replace(".", "").lower()
    if "." in word.strip(".") and bare.isalpha() and all(len(part) <= 2 for part in word.split(".")):
        return False  # "U.S.", "e.g.", "Ph.D."
    return bare not in _ABBREVIATIONS and not (bare in _NUMBERED and following.isdigit())


_SPECIAL_TOKEN: Final = re.compile(r"<\|[^|<>]*\|>")
_LINK: Final = re.compile(r"!?\[([^\[\]]*)\]\([^()]*\)")
_URL: Final = re.compile(r"<?(?:https?://|www\.)[^\s<>]*[^\s<>.,;:!?)\]*_`'\"]>?")
_TAG: Final = re.compile(r"</?[A-Za-z][A-Za-z0-9]*\s*/?>")
_FENCE: Final = re.compile(r"^\s*(?:```|~~~)\s*[\w+-]*\s*$")
_LINE_MARKS: Final = re.compile(r"^\s*(?:(?:[-+*•‣▪]|#{1,6}|>)\s+(?:\[[ xX]\]\s+)?)+")
_TIMES: Final = re.compile(r"(?<=\d)\s*\*\s*(?=\d)")
_WORD_JOIN: Final = re.compile(r"(?<=[^\W_])_+(?=[^\W_])")
_MARKS: Final = re.compile(r"\(\s*\)|[*_`#|\\\[\]{}]+|~~+")
_BLANKS: Final = re.compile(r"[^\S\n]+")
_DROPPED: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Me", "Sk", "So"})
"""Unicode categories without a sound: control, format, unassigned, private, surrogate, enclosing, symbols (emoji)."""


def speakable(text: str) -> str:
    """What is spoken of ``text``: no markdown marks, URLs, emoji, control characters or special tokens.

    A link is spoken as its text. Lines stay lines. "" if no letter or digit is left.
    """
    lines = (_speakable_line(line) for line in text.splitlines())
    spoken = "\n".join(line for line in lines if line)
    return spoken if any(char.isalnum() for char in spoken) else ""


def _speakable_line(line: str) -> str:
    if _FENCE.match(line):
        return ""
    line = _SPECIAL_TOKEN.sub(" ", line)
    line = _LINK.sub(r"\1", line)
    line = _URL.sub(" ", line)
    line = _TAG.sub(" ", line)
    line = _LINE_MARKS.sub("", line)
    line = _TIMES.sub(" times ", line)
    line = _WORD_JOIN.sub(" ", line)
    line = _MARKS.sub("", line)
    line = "".join(char if _sounds(char) else " " if char == "\t" else "" for char in line)
    line = _BLANKS.sub(" ", line).strip()
    return re.sub(r" ([.,;:!?])", r"\1", line)  # what a removed URL or emoji stood in front of


def _sounds(char: str) -> bool:
    """Whether the character can matter to speech; a degree sign can, variation selectors can not."""
    if char == "°":
        return True
    return unicodedata.category(char) not in _DROPPED and not "\ufe00" <= char <= "\ufe0f"
