"""What every kind of text produces, and the small helpers that they share.

A sample knows nothing of chat markers or tokens: `corpus.py` renders it. It does say which facts
it would give away (`facts`), because a held-out product such as 12 * 9 may also hide inside a word
problem or a division.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One exchange.

    `continues` marks plain text whose answer follows the prompt with nothing in between. `closed`
    marks rows of small tables: to hold out their few prompts would be to hold out the answer
    itself.
    """

    kind: str
    prompt: str
    answer: str
    continues: bool = False
    facts: tuple[str, ...] = ()
    closed: bool = False


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """`rng.choice`, with a name that reads well inside templates."""
    return items[rng.randrange(len(items))]


def either(rng: random.Random, *items: T) -> T:
    """`pick` among a few that stand where they are drawn."""
    return pick(rng, items)


def article(noun: str) -> str:
    """The noun with its indefinite article: a fox, an owl."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def capital(text: str) -> str:
    """The text with its first letter in upper case and the rest untouched."""
    return text[:1].upper() + text[1:]


def joined(items: Sequence[str]) -> str:
    """An English enumeration: a, b and c."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def numbered(items: Sequence[str]) -> str:
    """A numbered list, one item a line."""
    return "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def number(rng: random.Random, value: int) -> str:
    """A number up to twelve, as a word or in digits."""
    return NUMBER_WORDS[value] if rng.random() < 0.6 else str(value)


def words(text: str) -> tuple[str, ...]:
    """A word list, which reads better as text than as a column of strings."""
    return tuple(text.split())


SYLLABLES = words(
    """
    ba be bi bo bu da de di do du fa fe fi fo ga ge go gu ka ke ki ko ku la le li lo lu ma me
    mi mo mu na ne ni no nu pa pe pi po pu ra re ri ro ru sa se si so su ta te ti to tu va ve
    vi vo za ze zi zo zu lin mar tol ven dor kel nim zor pax rin tam hol fen gar sul wex yor
    bram clo dri fla gri plo qui sha sto tri
    """
)


VOWELS, CONSONANTS = "aeiouy", "bcdfghjklmnpqrstvwxz"
ORDINARY = words(
    """
    quick lazy jump over under river apple pear plum fig kiwi table chair window door street
    train station winter summer spring autumn morning evening night yesterday tomorrow always
    never often sometimes happy sad angry tired hungry warm cold early late simple hard easy
    strong weak heavy light new old small large tall short wide deep bright dark clean dirty
    full empty first second third last next other same different important possible ready sure
    true false walk run stand sit sleep wake eat drink cook write read speak listen watch
    think know learn teach work play build break carry push pull open close begin finish
    travel visit meet call answer ask send receive buy sell pay count measure draw sing people
    family mother father sister brother child friend neighbour doctor teacher student worker
    driver market shop school office kitchen garden forest mountain island ocean beach desert
    bridge road ticket luggage passport airport hotel restaurant breakfast lunch dinner bread
    butter cheese milk sugar salt pepper soup salad chicken potato tomato onion carrot rice
    noodle paper pencil computer screen keyboard phone camera picture film music song dance
    theatre game football tennis winner team score minute hour week month year century history
    science nature animal plant flower tree leaf grass wind rain snow storm cloud thunder
    weather temperature energy engine machine wheel metal wood plastic cotton silk colour
    shape circle square line point number letter word sentence question story poem chapter
    library language grammar meaning idea plan project problem solution reason result example
    system network server request response memory storage battery signal message channel
    version update release error warning value variable function object method class thread
    process queue buffer index vector matrix layer weight batch sample budget price market
    customer contract meeting report manager company factory product quality safety health
    medicine hospital patient exercise brain heart blood bone king queen castle soldier peace
    war law judge freedom village city country world planet space rocket moon universe
    """
)


def _letters(rng: random.Random) -> str:
    """Letters at random, vowels often between consonants, as in a foreign name."""
    letters = []
    for index in range(rng.randint(3, 9)):
        vowel = (index % 2 == 1) != (rng.random() < 0.25)
        letters.append(pick(rng, VOWELS if vowel else CONSONANTS))
    return "".join(letters)


def invented_word(rng: random.Random) -> str:
    """A word that no table of answers holds, so that copying it cannot be learned by heart."""
    roll = rng.random()
    if roll < 0.35:
        return "".join(pick(rng, SYLLABLES) for _ in range(rng.randint(2, 3)))
    return _letters(rng) if roll < 0.75 else pick(rng, ORDINARY)


def any_name(rng: random.Random) -> str:
    """A first name, one in three invented."""
    return pick(rng, NAMES) if rng.random() < 0.65 else capital(invented_word(rng))


NUMBER_WORDS = words("zero one two three four five six seven eight nine ten eleven twelve")

NAMES = words(
    """
    Mia Tom Ada Leo Nina Omar Yuki Ines Ravi Lena Hugo Zoe Ivan Amara Felix Noor Paul Rosa
    Kofi Elif Sven Maya Luca Tara Emil Dana Jin Vera Otto Lila Samir Greta Bruno Alma Kai
    Freya Marco Hana Pablo Ruth
    """
)

ANIMALS = words(
    """
    fox owl bear rabbit mouse cat dog wolf deer hedgehog squirrel otter badger turtle frog
    crow sparrow duck goose swan horse goat sheep cow pig hen lion tiger elephant monkey panda
    penguin whale dolphin crab snail bee ant butterfly beaver mole lizard
    """
)

COLOURS = words("red blue green yellow orange purple white black brown grey pink silver golden")

OBJECTS = words(
    """
    key lamp book coin letter map bell rope cup hat basket ring stone mirror clock drum kite
    flute blanket lantern box spoon button feather candle whistle
    """
)

CITIES = words(
    """
    Oslo Paris Rome Cairo Lima Tokyo Berlin Madrid Vienna Dublin Quito Delhi Seoul Athens
    Lisbon Prague Bern Nairobi Ottawa Havana
    """
)
