"""Owns the facts and the ways to ask for them from which the sample data set is made.

It draws nothing and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """Facts of one kind; `{x}` and `{y}` in the texts stand for the two halves of a fact, `{X}` begins a sentence.

    `subject` is how a follow-up such as `And {x}?` names the fact; None where that makes no sense.
    """

    name: str
    questions: tuple[str, ...]
    answer: str
    facts: tuple[tuple[str, str], ...]
    subject: str | None = None


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Return the `x=y` pairs of a comma-separated text, line breaks being spaces."""
    entries = " ".join(text.split()).strip(" ,").split(",")
    return tuple((left.strip(), right.strip()) for left, right in (entry.split("=") for entry in entries))


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def _next_ones(names: str) -> tuple[tuple[str, str], ...]:
    """Return each name with the one after it, the last with the first."""
    ring = names.split()
    return tuple(zip(ring, ring[1:] + ring[:1], strict=True))


_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
_MONTHS = "January February March April May June July August September October November December"
_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)

CAPITALS = Topic(
    "capital",
    _lines("""What is the capital of {x}?
        Which city is the capital of {x}?
        Name the capital of {x}.
        Tell me the capital city of {x}.
        Do you know the capital of {x}?
        I am looking for the capital of {x}.
        What do we call the capital of {x}?
        The capital of {x}, please.
        If I visit {x}, which city is the capital?
        Please name the capital city of {x}."""),
    "The capital of {x} is {y}.",
    _pairs("""France=Paris, Spain=Madrid, Italy=Rome, Germany=Berlin, Portugal=Lisbon, Greece=Athens,
        Poland=Warsaw, Austria=Vienna, Hungary=Budapest, Sweden=Stockholm, Norway=Oslo, Denmark=Copenhagen,
        Finland=Helsinki, Ireland=Dublin, Japan=Tokyo, China=Beijing, Thailand=Bangkok, Vietnam=Hanoi,
        Egypt=Cairo, Kenya=Nairobi, Ghana=Accra, Morocco=Rabat, Senegal=Dakar, Peru=Lima, Cuba=Havana,
        Canada=Ottawa, Brazil=Brasilia, Nepal=Kathmandu"""),
    subject="{x}",
)
CONTINENTS = Topic(
    "continent",
    _lines("""Which continent is {x} in?
        On which continent do I find {x}?
        Where in the world is {x}?
        What continent does {x} belong to?
        Tell me the continent of {x}.
        I live in {x}. Which continent is that?
        Name the continent where {x} lies.
        Please tell me where {x} lies."""),
    "You find {x} in {y}.",
    _pairs("""France=Europe, Spain=Europe, Italy=Europe, Germany=Europe, Portugal=Europe, Greece=Europe,
        Poland=Europe, Austria=Europe, Sweden=Europe, Norway=Europe, Ireland=Europe, Japan=Asia,
        China=Asia, Thailand=Asia, Vietnam=Asia, Nepal=Asia, Egypt=Africa, Kenya=Africa, Ghana=Africa,
        Morocco=Africa, Senegal=Africa, Peru=South America, Brazil=South America, Cuba=North America,
        Canada=North America"""),
    subject="{x}",
)
LANGUAGES = Topic(
    "language",
    _lines("""Which language is widely spoken in {x}?
        What do most people in {x} speak?
        Which language do I hear most in {x}?
        I am going to {x}. Which language should I learn?
        Name a language that is common in {x}.
        What language would help me in {x}?
        Which language will I hear in the streets of {x}?
        Tell me which language people use in {x}."""),
    "Many people in {x} speak {y}.",
    _pairs("""France=French, Spain=Spanish, Italy=Italian, Germany=German, Portugal=Portuguese, Greece=Greek,
        Poland=Polish, Austria=German, Hungary=Hungarian, Sweden=Swedish, Norway=Norwegian, Denmark=Danish,
        Finland=Finnish, Ireland=English, Japan=Japanese, China=Chinese, Thailand=Thai, Vietnam=Vietnamese,
        Egypt=Arabic, Kenya=Swahili, Peru=Spanish, Cuba=Spanish, Brazil=Portuguese, Senegal=Wolof"""),
    subject="{x}",
)
OPPOSITES = Topic(
    "opposite",
    _lines("""What is the opposite of {x}?
        Give me the opposite of {x}.
        Which word is the opposite of {x}?
        Which word means just the opposite of {x}?
        If it is not {x}, what is it?
        Tell me what the opposite of {x} is.
        Turn {x} into its opposite.
        The opposite of {x}, please."""),
    "The opposite of {x} is {y}.",
    _pairs("""hot=cold, cold=hot, big=small, small=big, fast=slow, slow=fast, up=down, down=up, left=right,
        right=left, day=night, night=day, open=closed, closed=open, full=empty, empty=full, wet=dry, dry=wet,
        happy=sad, sad=happy, young=old, old=young, light=dark, dark=light, loud=quiet, quiet=loud, early=late,
        late=early, near=far, far=near, hard=soft, soft=hard, rich=poor, poor=rich, true=false, false=true,
        first=last, last=first, clean=dirty, dirty=clean, high=low, low=high, thick=thin, thin=thick"""),
    subject="{x}",
)
SOUNDS = Topic(
    "sound",
    _lines("""What sound does {x} make?
        What does {x} say?
        Which noise does {x} make?
        How does {x} sound?
        I met {x} today. What did it say?
        Tell me the sound of {x}.
        When {x} wants to talk, what do we hear?
        Please make the sound of {x}."""),
    "{X} says {y}.",
    _pairs("""a cow=moo, a dog=woof, a cat=meow, a duck=quack, a sheep=baa, a pig=oink, a lion=roar, an owl=hoot,
        a bee=buzz, a snake=hiss, a frog=croak, a mouse=squeak, a horse=neigh, a crow=caw, a chick=cheep"""),
    subject="{x}",
)
YOUNG = Topic(
    "young",
    _lines("""What is the young of {x} called?
        What do we call the baby of {x}?
        Which word names the young of {x}?
        {X} has a baby. What is it called?
        Name the baby of {x}.
        Tell me the word for the young of {x}.
        What will grow up to be {x}?
        What do you call the child of {x}?"""),
    "The young of {x} is called {y}.",
    _pairs("""a dog=a puppy, a cat=a kitten, a cow=a calf, a horse=a foal, a sheep=a lamb, a pig=a piglet,
        a duck=a duckling, a goat=a kid, a bear=a cub, a deer=a fawn, a hen=a chick, a goose=a gosling,
        a swan=a cygnet, a frog=a tadpole, an owl=an owlet, a kangaroo=a joey"""),
    subject="{x}",
)
LEGS = Topic(
    "legs",
    _lines("""How many legs does {x} have?
        Count the legs of {x}.
        {X} walks by. How many legs do I see?
        On how many legs does {x} stand?
        What is the number of legs of {x}?
        How many shoes would {x} need?
        Tell me how many legs {x} has.
        I drew {x}. How many legs should it have?"""),
    "{X} has {y} legs.",
    _pairs("""a cow=four, a dog=four, a cat=four, a duck=two, a hen=two, a spider=eight, an ant=six, a bee=six,
        a beetle=six, a horse=four, an owl=two, a crow=two, a frog=four, a snake=no, a worm=no, a crab=ten,
        a scorpion=eight, a goose=two"""),
    subject="{x}",
)
HOMES = Topic(
    "home",
    _lines("""Where does {x} live?
        What is the home of {x} called?
        Where will I find {x}?
        Tell me where {x} lives.
        In which home does {x} sleep?
        Where does {x} go at night?
        {X} goes home. Where is that?
        Please name the home of {x}."""),
    "{X} lives in {y}.",
    _pairs("""a bee=a hive, a bird=a nest, a dog=a kennel, a spider=a web, a horse=a stable, a rabbit=a burrow,
        a bear=a den, a fish=the water, a beaver=a lodge, a king=a castle, a monk=a monastery"""),
    subject="{x}",
)
COLOURS = Topic(
    "colour",
    _lines("""What colour is {x}?
        Which colour does {x} have?
        I want to paint {x}. Which colour do I need?
        Tell me the colour of {x}.
        Name the colour of {x}.
        Which pencil should I take to draw {x}?
        When you see {x}, what colour is it?
        Describe {x} with a colour."""),
    "The colour of {x} is {y}.",
    _pairs("""a ripe banana=yellow, a ripe tomato=red, fresh snow=white, fresh grass=green, coal=black,
        a clear sky=blue, a carrot=orange, a polar bear=white, a flamingo=pink, a lemon=yellow, a plum=purple,
        chocolate=brown, a cucumber=green, milk=white, a raven=black, an elephant=grey, a fire engine=red,
        a sunflower=yellow"""),
    subject="{x}",
)
KINDS = Topic(
    "kind",
    _lines("""What is {x}?
        What kind of thing is {x}?
        Tell me what {x} is.
        Which group does {x} belong to?
        I do not know what {x} is. Do you?
        Explain to me what {x} is.
        In one line: what is {x}?
        Please say what {x} is."""),
    "{X} is {y}.",
    _pairs("""a robin=a bird, a crow=a bird, a goose=a bird, an owl=a bird, a salmon=a fish, a trout=a fish,
        a shark=a fish, an oak=a tree, a birch=a tree, a maple=a tree, a rose=a flower, a tulip=a flower,
        a daisy=a flower, an apple=a fruit, a pear=a fruit, a plum=a fruit, a carrot=a vegetable,
        a cabbage=a vegetable, an onion=a vegetable, a hammer=a tool, a saw=a tool, a violin=an instrument,
        a flute=an instrument, a piano=an instrument, an ant=an insect, a bee=an insect, a beetle=an insect,
        a chair=furniture, a table=furniture"""),
    subject="{x}",
)
JOBS = Topic(
    "job",
    _lines("""Who {x}?
        Which person {x}?
        What do we call somebody who {x}?
        Name the person who {x}.
        Tell me who {x}.
        I met a person who {x}. What is the job?
        Whose job is it: somebody who {x}?
        Guess the job: this person {x}."""),
    "Somebody who {x} is {y}.",
    _pairs("""bakes bread=a baker, flies a plane=a pilot, teaches children=a teacher, grows corn=a farmer,
        puts out fires=a firefighter, cuts hair=a barber, writes books=an author, paints pictures=a painter,
        repairs teeth=a dentist, sells meat=a butcher, catches fish=a fisher, makes clothes=a tailor,
        delivers letters=a mail carrier, drives a bus=a driver, cooks soup=a cook, looks after sick people=a nurse"""),
)
PLURALS = Topic(
    "plural",
    _lines("""What is the plural of {x}?
        One {x}, but two of them are what?
        How do I write more than one {x}?
        Give me the plural of {x}.
        I have one {x}. What do I call two?
        Which word means more than one {x}?
        Tell me the plural of the word {x}.
        The plural of {x}, please."""),
    "The plural of {x} is {y}.",
    _pairs("""mouse=mice, child=children, foot=feet, tooth=teeth, goose=geese, man=men, woman=women, person=people,
        leaf=leaves, wolf=wolves, knife=knives, box=boxes, dish=dishes, city=cities, baby=babies, berry=berries,
        tomato=tomatoes, house=houses, book=books, tree=trees, star=stars, bus=buses, sheep=sheep, fox=foxes"""),
    subject="{x}",
)
PASTS = Topic(
    "past",
    _lines("""What is the past tense of {x}?
        Today I {x}. What did I do yesterday?
        Give me the past tense of {x}.
        How do I write {x} in the past?
        Put {x} into the past.
        Which word is the past tense of {x}?
        Tell me the past tense of the word {x}.
        The past tense of {x}, please."""),
    "The past tense of {x} is {y}.",
    _pairs("""go=went, see=saw, eat=ate, run=ran, sing=sang, swim=swam, drink=drank, write=wrote, drive=drove,
        give=gave, take=took, come=came, find=found, think=thought, buy=bought, bring=brought, sleep=slept,
        keep=kept, fly=flew, grow=grew, know=knew, walk=walked, play=played, jump=jumped"""),
    subject="{x}",
)
NEXT_DAY = Topic(
    "next day",
    _lines("""Which day comes after {x}?
        What day follows {x}?
        Today is {x}. What day is tomorrow?
        Name the day after {x}.
        Tell me which day is next after {x}.
        It was {x} yesterday. What day is it today?
        One day later than {x} is what?
        After {x}, which day is it?"""),
    "The day after {x} is {y}.",
    _next_ones(_DAYS),
)
NEXT_MONTH = Topic(
    "next month",
    _lines("""Which month comes after {x}?
        What month follows {x}?
        It is {x}. What is the next month?
        Name the month after {x}.
        Tell me which month is next after {x}.
        Now {x} is over. Which month begins?
        One month later than {x} is what?
        After {x}, which month is it?"""),
    "The month after {x} is {y}.",
    _next_ones(_MONTHS),
)
LETTERS = Topic(
    "letter",
    _lines("""Which letter comes after {x}?
        What letter follows {x}?
        Name the letter after {x}.
        In the alphabet, what comes after {x}?
        Tell me the letter that is next after {x}.
        I say {x}. Which letter do you say?
        After {x}, which letter is it?
        Go on in the alphabet from {x}."""),
    "After {x} comes {y}.",
    _next_ones(" ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))[:-1],
)
NUMBERS = Topic(
    "number word",
    _lines("""How do I write {x} as a word?
        Write the number {x} as a word.
        Which word stands for {x}?
        Spell the number {x}.
        What is {x} in letters?
        Tell me the word for the number {x}.
        Say {x} in words.
        Please turn {x} into a word."""),
    "The number {x} is written {y}.",
    tuple((str(i), word) for i, word in enumerate(_WORDS.split())),
    subject="{x}",
)
SUMS = Topic(
    "sum",
    _lines("""What is {x}?
        Add up {x}.
        How much is {x}?
        Please work out {x}.
        Tell me what {x} makes.
        Can you add {x}?
        Find the sum {x}.
        My homework says {x}. What is it?"""),
    "The sum {x} is {y}.",
    tuple((f"{a} + {b}", str(a + b)) for a in range(1, 8) for b in range(1, 8)),
    subject="{x}",
)

TOPICS = (
    CAPITALS, OPPOSITES, SOUNDS, NEXT_DAY, SUMS, COLOURS, PLURALS, CONTINENTS, YOUNG, PASTS, LEGS, LANGUAGES, JOBS,
    NEXT_MONTH, HOMES, KINDS, LETTERS, NUMBERS,
)  # fmt: skip
