"""A small deterministic text, for machines where tiny Shakespeare can't be had.

Sentences from a fixed grammar, laid out like a play: sections of a speaker's name and a few
lines. A model learns its spelling, words and grammar within some hundred steps; its loss is not
comparable with tiny Shakespeare's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

TEXT_BYTES = 1_100_000

# One word after the other, so that the lists stay short to read.
NOUNS = """
    apple barn bell boat bridge candle cart chair clock cloud coat door dog field fire fish
    garden gate goat hammer hill horse house key ladder lamp letter map market mill mountain
    needle orchard oven path pot rain river road roof rope sail shadow ship shoe snow song stone
    storm street table tower town tree wagon wall well wheel wind window
""".split()
ADJECTIVES = """
    black blue bright broken brown cold deep dry empty gentle golden green grey heavy high late
    little long narrow new old quiet red round sharp slow small strong tall warm white young
""".split()
# Present and past.
VERBS = [
    tuple(verb.split("/"))
    for verb in """
    bring/brought build/built carry/carried close/closed count/counted cover/covered draw/drew
    fear/feared find/found follow/followed forget/forgot guard/guarded hear/heard hide/hid
    hold/held keep/kept leave/left lose/lost love/loved make/made mend/mended open/opened
    paint/painted praise/praised reach/reached see/saw sell/sold show/showed take/took
    watch/watched
""".split()
]
SPEAKERS = [
    name.replace("_", " ")
    for name in """
    BAKER BRIDGE_KEEPER CLERK DOCTOR FARMER First_Rower GARDENER JUDGE MASON MILLER PAINTER
    PILOT POTTER Second_Rower SMITH TAILOR TEACHER WEAVER
""".split()
]
PLACES = "above across behind below beside near over past under without".split()
TIMES = [
    time.replace("_", " ")
    for time in """
    before_the_morning after_the_harvest in_the_evening all_the_winter every_day once_a_year
    at_noon until_the_spring
""".split()
]


class Chooser:
    """Draws from a sequence; uses only random(), the one draw Python keeps the same for ever."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, limit: int) -> int:
        """A whole number from 0 to limit - 1."""
        return int(self._random.random() * limit)

    def pick(self, items: Sequence[Item]) -> Item:
        """One of the items; the smaller of two draws, so that early ones are more frequent."""
        return items[min(self.below(len(items)), self.below(len(items)))]


def make_thing(draw: Chooser) -> str:
    """A noun with an article and perhaps an adjective."""
    noun = draw.pick(NOUNS)
    words = f"{draw.pick(ADJECTIVES)} {noun}" if draw.below(2) else noun
    if draw.below(3):
        return f"the {words}"
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def make_sentence(draw: Chooser) -> str:
    """One sentence in one of six shapes."""
    verb = draw.pick(VERBS)
    shape = draw.below(6)
    if shape == 0:
        text = f"who {verb[1]} {make_thing(draw)} {draw.pick(TIMES)}?"
    elif shape == 1:
        text = f"if you {verb[0]} {make_thing(draw)}, I will {draw.pick(VERBS)[0]} it again."
    elif shape == 2:
        text = f"we {verb[1]} {make_thing(draw)} {draw.pick(PLACES)} {make_thing(draw)}."
    elif shape == 3:
        text = f"{make_thing(draw)} is {draw.pick(ADJECTIVES)} and {draw.pick(ADJECTIVES)};"
    elif shape == 4:
        text = f"do not {verb[0]} {make_thing(draw)}, good {draw.pick(SPEAKERS).lower()}!"
    else:
        text = f"{make_thing(draw)} {verb[1]} {make_thing(draw)} {draw.pick(TIMES)}."
    return text[0].upper() + text[1:]


def make_text(size: int = TEXT_BYTES, seed: int = 1) -> str:
    """At least `size` characters of ASCII: sections 'NAME:' + lines, an empty line between."""
    draw = Chooser(seed)
    sections: list[str] = []
    length = 0
    while length < size:
        lines = [f"{draw.pick(SPEAKERS)}:"]
        lines += [make_sentence(draw) for _ in range(1 + draw.below(6))]
        section = "\n".join(lines)
        sections.append(section)
        length += len(section) + 2
    return "\n\n".join(sections) + "\n"
