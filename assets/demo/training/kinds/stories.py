# ruff: noqa: E501  (tables with one row per line read better than wrapped ones)
"""Short stories from a small grammar: a hero, a place, a plot in slots, an ending with a thought.

Each slot offers a few sentences; names and pronouns stay the same through a story, so a model can
learn to keep them.
"""

from __future__ import annotations

import random

from kinds.sample import ANIMALS, COLOURS, Sample, article, invented_word, pick, words

HERO_NAMES = words(
    """
    Nilo Pip Luma Bramble Tiko Sable Mira Fenn Olli Juno Wren Basil Koda Tansy Milo Hazel Rumi
    Clover Finn Poppy
    """
)
PEOPLE = words(
    """
    girl boy baker sailor painter gardener robot dragon wizard princess king knight teacher
    farmer astronaut giant ghost pirate mermaid doctor
    """
)
PLACES = (
    "near a quiet river",
    "at the edge of a dark forest",
    "in a small village by the sea",
    "on a green hill",
    "in an old stone tower",
    "beside a silver lake",
    "under a great oak tree",
    "in a valley full of flowers",
    "on a windy island",
    "behind the tall mountains",
    "in a busy city",
    "next to an old mill",
)
TRAITS = ["little", "brave", "curious", "clever", "shy", "kind", "young", "quiet", "lazy", "proud"]

# Each plot: how a prompt may name it, then its slots in order. {h} hero noun, {n} name, {f} friend
# noun, {m} friend's name, {t} thing, {c} colour, {s}/{S} she or he, {o} her or him, {p} her or
# his.
Plot = tuple[str, tuple[tuple[str, ...], ...]]
# fmt: off
PLOTS: dict[str, Plot] = {
    "lost": ("who loses a {t}", (
        ("{S} had a {c} {t} that {p} grandmother had given {o}.", "More than anything, {n} loved {p} {c} {t}."),
        ("One morning, the {t} was gone.", "But one day, {n} woke up and could not find the {t}."),
        ("{n} looked under the bed, behind the door, and in the garden, but {s} found nothing.",
         "{S} searched the whole house twice, and still there was no {t}."),
        ("Then {s} met {af} named {m}.", "On the path, {s} met {m}, {af} with a warm smile."),
        ('"Do not worry," said {m}. "Let us look together."', '"I will help you," said {m}. "Two can see more than one."'),
        ("They followed small tracks through the grass until they came to a hollow tree.",
         "They walked along the stream and asked everyone they met."),
        ("There, between the leaves, something {c} was shining.", "At last, {m} pointed at something {c} in the sand."),
        ("It was the {t}!", "It was the {c} {t}, safe and dry."),
        ("{n} was so happy that {s} danced in a circle.", "{n} hugged {p} new friend and laughed."),
        ("From that day on, {n} and {m} were the best of friends.", "After that, {n} never walked alone again."),
        ("And {n} learned that a good friend is worth more than any {t}.",
         "{n} had found the {t}, but the friend was the greater treasure."))),
    "storm": ("who is caught in a storm", (
        ("Every day, {s} walked a little further from home to see something new.",
         "{S} liked to climb high and look at the clouds."),
        ("One evening, the sky turned black and the wind began to howl.",
         "One afternoon, a great storm came over the hills."),
        ("The rain fell so hard that {n} could not see the path.", "Thunder shook the ground, and {n} was afraid."),
        ('"I must find a dry place," {s} thought.', '"Where can I hide?" {n} whispered.'),
        ("Just then, {s} saw a small light between the trees.", "Then {s} heard a voice calling from a cave."),
        ("It was {m}, {af} with a {c} {t}.", "There stood {m}, {af} who carried a {c} {t}."),
        ('"Come in," said {m}. "There is room for two."', '"You can stay here until the morning," said {m}.'),
        ("They shared warm soup and told each other stories until the storm was over.",
         "They sat close together, and soon the thunder did not sound so loud."),
        ("In the morning, the sun came out and the whole world was shining.",
         "When the sun rose, every leaf was bright with water."),
        ("{n} thanked {m} and gave {om} a flower.", "{n} promised to come back with bread and honey."),
        ("{S} had learned that even the longest storm ends, and that it ends sooner with a friend.",
         "And whenever it rained, {n} remembered the light between the trees."))),
    "learn": ("who learns to {skill}", (
        ("All the others could {skill}, but {n} could not.", "{S} had one secret wish: {s} wanted to {skill}."),
        ("Every time {s} tried, it went wrong, and the others laughed.", "{S} had tried once, and it had ended badly."),
        ("One day, {s} met {m}, an old {f}.", "Then an old {f} named {m} came to visit."),
        ('"I was afraid too, once," said {m}. "Begin with one small step."',
         '"Nobody can do it on the first day," said {m}. "Try a little every morning."'),
        ("So {n} tried again.", "{n} took a deep breath and began."),
        ("On the first day, it did not work at all.", "The first time, {s} fell over."),
        ("On the second day, it worked a little.", "The second time, it was a little better."),
        ("{m} smiled and said nothing.", "{m} gave {o} an apple and told {o} to rest."),
        ("On the seventh day, everyone came to watch, and {n} could {skill} better than all of them.",
         "After many days, {n} could {skill} all by {o}self."),
        ("The others cheered, and {n} bowed.", "{n} laughed out loud, because {s} was so proud."),
        ("And from then on, {s} helped everyone who was still afraid to begin.",
         "{S} never forgot that every master was once a beginner."))),
    "treasure": ("who finds a treasure", (
        ("One day, {n} found an old map inside a {c} bottle.", "One day, {n} dug in the ground and found a {c} map."),
        ("The map showed a path to a treasure.", "A small cross on the map marked a secret place."),
        ("{n} packed some bread, a rope, and a lamp, and set out at once.",
         "{S} put on {p} boots and left before the sun was up."),
        ("First, {s} crossed a bridge that swung in the wind.", "The path led over a bridge of old rope."),
        ("On the other side sat {m}, a hungry {f}.", "Halfway there, {s} met {m}, {af} who had not eaten for two days."),
        ("{n} gave {om} half of the bread.", "{n} did not think long and shared the bread."),
        ('"Thank you," said {m}. "Now I will show you the way."', '"You are kind," said {m}. "I know that place. Follow me."'),
        ("Together they walked until they reached a door in the rock.", "Together they climbed up to a small cave."),
        ("Inside stood a chest, and in the chest lay a {c} {t} and a letter.",
         "In the cave was a box, and in the box they found a {c} {t} and a note."),
        ('The letter said: "The real treasure is the one who came with you."',
         'The note said: "Whoever shares the road has found the treasure."'),
        ("{n} looked at {m}, and both began to laugh.", "{n} and {m} kept the {t} and stayed friends forever."))),
    "garden": ("who grows a garden", (
        ("{S} found a single {c} seed on the road and took it home.", "A bird had dropped a {c} seed in front of {p} door."),
        ("{n} planted it in the earth and gave it water every day.", "{n} put it in a pot and set it in the sun."),
        ("For a long time, nothing happened.", "A week went by, and the earth stayed bare."),
        ('"It will never grow," said {m} the {f}.', '"You are wasting your time," said {m}, {af} from next door.'),
        ('"Then I will wait a little longer," said {n}.', 'But {n} said, "Good things need time."'),
        ("One morning, there was a tiny green leaf.", "Then, after a warm night, a small leaf looked out of the earth."),
        ("It grew and grew, until it was as tall as the house.", "Day after day it grew, and soon it had {c} flowers."),
        ("Everyone came to see it, and even {m} could not believe it.",
         "People came from far away, and {m} was the first of them."),
        ("{n} gave a seed to each visitor.", "In autumn, {n} shared the seeds with everyone."),
        ("The next year, the whole land was full of {c} flowers.", "A year later, there were gardens everywhere."),
        ("And that is how one small seed changed the world around it.",
         "And {m} had the biggest garden of all, because {mp} had learned to wait."))),
    "star": ("who wants to touch a star", (
        ("Every night, {s} looked up at one {c} star.", "Each evening, {s} sat outside and counted the stars."),
        ('"One day, I will touch it," {s} said.', '"I want to know how a star feels," said {n}.'),
        ("So {s} climbed the highest tree, but the star was still far away.",
         "First {s} built a ladder, but it was much too short."),
        ("Then {s} asked {m}, a wise {f}, for help.", "So {s} went to {m}, {af} who knew many things."),
        ('"You cannot reach it from here," said {m}, "but it can reach you."',
         '"A star is too far to touch," said {m}, "but not too far to visit you."'),
        ("{m} led {o} to a still pond in the forest.", "They walked through the night until they came to a lake."),
        ("The water was as smooth as glass, and in the middle shone the {c} star.",
         "There was no wind, and the whole sky lay in the water."),
        ("{n} put out a hand and touched it, very gently.", "Slowly, {n} touched the light with one finger."),
        ("The star danced on the water and then became still again.", "Rings of light ran over the water to the shore."),
        ("{n} walked home and smiled all the way.", "That night, {n} slept better than ever before."),
        ("{S} had learned that some things come close when you are quiet.",
         "And every clear night, {s} went back to greet {p} star."))),
}
# fmt: on
# Only colours that take "a", since the sentences spell the article out.
STORY_COLOURS = tuple(colour for colour in COLOURS[:9] if colour != "orange")
SKILLS = (
    "swim",
    "fly a kite",
    "sing",
    "dance",
    "skate",
    "read",
    "climb trees",
    "bake bread",
    "paint",
    "whistle",
)
THINGS = words("key ring bell book lamp coin kite scarf flute button shell hat compass marble")
OPENINGS = (
    "Once upon a time, there was a {trait} {h} named {n}, who lived {place}.",
    "Once upon a time, a {trait} {h} named {n} lived {place}.",
    "Long ago, a {trait} {h} called {n} lived {place}.",
)
ASKS = (
    "Tell me a story about {x}",
    "Tell me a short story about {x}",
    "Write a story about {x}",
    "Write a short story about {x}",
    "Can you tell me a story about {x}?",
    "I would like a story about {x}",
    "Please tell me a story about {x}",
    "Give me a story about {x}",
    "A story about {x}, please",
    "Make up a story about {x}",
    "Write me a story about {x}",
    "Could you tell me a story about {x}?",
    "Story about {x}",
    "I want to hear a story about {x}",
    "Tell a story about {x}",
    "Do you know a story about {x}?",
)


def _cast(rng: random.Random) -> dict[str, str]:
    """Everything that stays the same within one story."""
    hero = pick(rng, ANIMALS if rng.random() < 0.75 else PEOPLE)
    if rng.random() < 0.08:
        hero = invented_word(rng)
    friend = pick(rng, [animal for animal in ANIMALS if animal != hero])
    name, other = rng.sample(HERO_NAMES, 2)
    female = rng.random() < 0.5
    if hero in ("girl", "princess", "mermaid"):
        female = True
    if hero in ("boy", "king"):
        female = False
    she = ("she", "her", "her") if female else ("he", "him", "his")
    her = ("she", "her") if rng.random() < 0.5 else ("he", "him")
    return {
        "h": hero,
        "f": friend,
        "n": name,
        "m": other,
        "trait": pick(rng, TRAITS),
        "place": pick(rng, PLACES),
        "t": pick(rng, THINGS),
        "c": pick(rng, STORY_COLOURS),
        "skill": pick(rng, SKILLS),
        "s": she[0],
        "S": she[0].capitalize(),
        "o": she[1],
        "p": she[2],
        "mp": her[0],
        "om": her[1],
        "af": article(friend),
    }


def tell(rng: random.Random, cast: dict[str, str], plot: str) -> str:
    """The story itself, in one or in three paragraphs."""
    opening = pick(rng, OPENINGS).replace("a {trait}", article(cast["trait"]))
    sentences = [opening.format(**cast)]
    # One slot in eight is left out, so that the length cannot be foreseen; the turning points stay.
    slots = PLOTS[plot][1]
    for index, slot in enumerate(slots):
        if 1 < index < len(slots) - 1 and index in (2, 8) and rng.random() < 0.2:
            continue
        sentence = pick(rng, slot).format(**cast)
        sentences.append(sentence[:1].upper() + sentence[1:])
    if rng.random() < 0.5:
        return " ".join(sentences)
    cuts = (3, 8)
    parts = (sentences[: cuts[0]], sentences[cuts[0] : cuts[1]], sentences[cuts[1] :])
    return "\n".join(" ".join(part) for part in parts)


def _topic(rng: random.Random, cast: dict[str, str], plot: str) -> str:
    """What the prompt asks for. Whatever it names must come true in the story."""
    roll = rng.random()
    hero = article(cast["h"])
    if roll < 0.45:
        return hero
    if roll < 0.60:
        return f"{hero} and {article(cast['f'])}"
    if roll < 0.80:
        return f"{hero} {PLOTS[plot][0].format(**cast)}"
    if roll < 0.90:
        return f"{article(cast['trait'])} {cast['h']}"
    return f"{hero} named {cast['n']}"


def draw_story(rng: random.Random) -> Sample:
    """A question for a story, or the beginning of one to be continued."""
    cast, plot = _cast(rng), pick(rng, sorted(PLOTS))
    text = tell(rng, cast, plot)
    roll = rng.random()
    if roll < 0.72:
        ask = pick(rng, ASKS).format(x=_topic(rng, cast, plot))
        return Sample("story", ask if ask.endswith("?") else ask + ".", text)
    words = text.split(" ")
    cut = rng.choice((4, 6, 8, rng.randint(3, 40)))
    prompt = " ".join(words[:cut])
    if rng.random() < 0.3:
        prompt = prompt.rstrip(",.")
    return Sample("story", prompt, text[len(prompt) :], continues=True)


def draw_text(rng: random.Random) -> tuple[str, dict[str, str]]:
    """A bare story and its cast, for the kinds that copy from or ask about a text."""
    cast, plot = _cast(rng), pick(rng, sorted(PLOTS))
    return tell(rng, cast, plot), cast
