"""The training text of the demo model: little stories, and questions with answers, composed from our own lists.

Story openings that work well:  "Once upon a time, there was a little girl named", "One day, a boy named Tom",
"Mia had a red kite.", "In a small village lived a boy named".
Questions it can answer (see FORMS for all of their forms): the sound, home, food, young and legs of an animal; the colour,
taste or use of a thing; the opposite of a word; the capital of a country; the day or month after another; sums to 18.
Everything else it turns down, with a sentence that says it is a tiny model.
"""

import itertools
import random
import re
from collections.abc import Iterator

# ------------------------------------------------------------------------------------------ facts

ANIMALS = {  # sound, home, food, young, legs
    "dog": ("bark", "a kennel", "bones", "a puppy", 4),
    "cat": ("meow", "a house", "fish", "a kitten", 4),
    "cow": ("moo", "a barn", "grass", "a calf", 4),
    "horse": ("neigh", "a stable", "hay", "a foal", 4),
    "sheep": ("bleat", "a meadow", "clover", "a lamb", 4),
    "pig": ("oink", "a sty", "scraps", "a piglet", 4),
    "duck": ("quack", "a pond", "weeds", "a duckling", 2),
    "hen": ("cluck", "a coop", "grain", "a chick", 2),
    "frog": ("croak", "a swamp", "flies", "a tadpole", 4),
    "bee": ("buzz", "a hive", "nectar", "a grub", 6),
    "lion": ("roar", "a den", "meat", "a cub", 4),
    "owl": ("hoot", "a hollow tree", "mice", "an owlet", 2),
    "mouse": ("squeak", "a hole", "cheese", "a pup", 4),
    "wolf": ("howl", "a forest", "deer", "a whelp", 4),
    "bear": ("growl", "a cave", "honey", "a bear cub", 4),
    "goose": ("honk", "a lake", "reeds", "a gosling", 2),
    "crow": ("caw", "a nest", "seeds", "a fledgling", 2),
    "snake": ("hiss", "a burrow", "eggs", "a snakelet", 0),
    "goat": ("bleat", "a hillside", "leaves", "a kid", 4),
    "monkey": ("chatter", "a jungle", "bananas", "an infant", 4),
}
COLOURS = {
    "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "a strawberry": "red", "the sky": "blue",
    "a carrot": "orange", "milk": "white", "a plum": "purple", "chocolate": "brown", "a cloud": "white",
    "a tomato": "red", "the sun": "yellow", "a raven": "black", "a leaf": "green", "an elephant": "gray",
    "a flamingo": "pink", "a pumpkin": "orange", "the sea": "blue", "a tree trunk": "brown",
}  # fmt: skip
USES = {
    "a spoon": "eating soup", "a knife": "cutting bread", "a pen": "writing letters", "a broom": "sweeping floors",
    "a key": "opening doors", "a clock": "telling time", "a needle": "sewing clothes", "a bed": "sleeping",
    "an umbrella": "staying dry", "a cup": "drinking tea", "a hammer": "driving nails", "a lamp": "giving light",
    "a comb": "tidying hair", "a boat": "crossing water", "a ladder": "climbing up", "a towel": "drying hands",
    "a kettle": "boiling water", "a shovel": "digging holes", "a map": "finding the way", "soap": "washing hands",
}  # fmt: skip
TASTES = {
    "honey": "sweet", "sugar": "sweet", "vinegar": "sour", "salt": "salty", "a lime": "sour", "coffee": "bitter",
    "a peach": "sweet", "sea water": "salty", "dark tea": "bitter", "a chili": "hot", "pepper": "hot", "cake": "sweet",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "happy": "sad", "day": "night", "up": "down", "old": "young",
    "wet": "dry", "hard": "soft", "open": "closed", "light": "dark", "full": "empty", "loud": "quiet", "rich": "poor",
    "early": "late", "strong": "weak", "clean": "dirty", "high": "low", "near": "far", "thick": "thin",
    "true": "false", "sweet": "sour", "long": "short", "good": "bad",
}  # fmt: skip
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "Egypt": "Cairo",
    "Greece": "Athens", "Norway": "Oslo", "Peru": "Lima", "Cuba": "Havana", "Kenya": "Nairobi", "Portugal": "Lisbon",
    "Austria": "Vienna", "Poland": "Warsaw", "Ireland": "Dublin", "Sweden": "Stockholm", "Russia": "Moscow",
    "China": "Beijing", "Finland": "Helsinki", "Hungary": "Budapest",
}  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
)
NUMBERS += ["seventeen", "eighteen"]

# ------------------------------------------------------------------------- forms: question, answer

FORMS: dict[str, tuple[list[str], str]] = {
    "sound": (
        ["What sound does a {x} make?", "What noise does a {x} make?", "Which sound does a {x} make?",
         "Tell me the sound of a {x}.", "How does a {x} sound?", "What does a {x} say?", "Can you name the sound of a {x}?"],
        "A {x} can {y}.",
    ),
    "home": (
        ["Where does a {x} live?", "What is the home of a {x}?", "Where is the home of a {x}?",
         "In what place does a {x} live?", "Tell me where a {x} lives.", "Where can I find a {x}?", "Where does a {x} sleep?"],
        "A {x} lives in {y}.",
    ),
    "food": (
        ["What does a {x} eat?", "What food does a {x} like?", "What does a {x} like to eat?", "Tell me what a {x} eats.",
         "What is the food of a {x}?", "What can I feed a {x}?", "Which food does a {x} eat?"],
        "A {x} eats {y}.",
    ),
    "young": (
        ["What is a young {x} called?", "What is a baby {x} called?", "What do we call a young {x}?",
         "What do we call a baby {x}?", "What is the name of a baby {x}?", "Tell me the name of a young {x}.",
         "How do you call a baby {x}?"],
        "A young {x} is called {y}.",
    ),
    "legs": (
        ["How many legs does a {x} have?", "How many legs has a {x}?", "Tell me how many legs a {x} has.",
         "What is the number of legs of a {x}?", "On how many legs does a {x} walk?", "Count the legs of a {x}.",
         "Do you know how many legs a {x} has?"],
        "A {x} has {y} legs.",
    ),
    "colour": (
        ["What color is {x}?", "Which color is {x}?", "What is the color of {x}?", "Tell me the color of {x}.",
         "What color does {x} have?", "Can you tell me what color {x} is?", "Which color does {x} have?"],
        "The color of {x} is {y}.",
    ),
    "use": (
        ["What is {x} for?", "What is {x} used for?", "What do we use {x} for?", "Tell me what {x} is for.",
         "What can I do with {x}?", "Why do people have {x}?", "What do people use {x} for?"],
        "We use {x} for {y}.",
    ),
    "taste": (
        ["How does {x} taste?", "What does {x} taste like?", "What is the taste of {x}?", "Tell me how {x} tastes.",
         "Which taste does {x} have?", "What taste does {x} have?", "Can you tell me how {x} tastes?"],
        "The taste of {x} is {y}.",
    ),
    "opposite": (
        ["What is the opposite of {x}?", "Tell me the opposite of {x}.", "Which word is the opposite of {x}?",
         "What word means the opposite of {x}?", "Can you name the opposite of {x}?", "Give me the opposite of {x}.",
         "What is not {x}?"],
        "The opposite of {x} is {y}.",
    ),
    "capital": (
        ["What is the capital of {x}?", "Which city is the capital of {x}?", "Tell me the capital of {x}.",
         "What city is the capital of {x}?", "Name the capital of {x}.", "What is the capital city of {x}?",
         "Do you know the capital of {x}?"],
        "The capital of {x} is {y}.",
    ),
    "next": (
        ["What comes after {x}?", "Which one comes after {x}?", "What is next after {x}?", "Tell me what follows {x}.",
         "What follows {x}?", "After {x} comes what?", "Do you know what comes after {x}?"],
        "After {x} comes {y}.",
    ),
    "sum": (
        ["What is {x}?", "How much is {x}?", "Tell me what {x} is.", "What does {x} make?", "Can you add {x}?",
         "Please work out {x}.", "What do I get from {x}?"],
        "The answer to {x} is {y}.",
    ),
}  # fmt: skip

UNTRAINED = {  # forms that no training text has; reported, not counted
    "sound": "Which noise comes from a {x}?", "home": "What place does a {x} call home?", "food": "What would a {x} eat?",
    "young": "How is a young {x} called?", "legs": "A {x} has how many legs?", "colour": "{x} has which color?",
    "use": "What would I need {x} for?", "taste": "When I eat {x}, how does it taste?",
    "opposite": "Which word is not like {x}?", "capital": "Of {x}, what is the capital?", "next": "And what comes after {x}?",
    "sum": "Let me know what {x} is.",
}  # fmt: skip


def facts() -> dict[str, dict[str, str]]:
    """For each kind of question, what is asked about and what is true of it."""
    place = {name: n for n, name in enumerate(("sound", "home", "food", "young", "legs"))}
    known = {kind: {a: str(ANIMALS[a][n]) for a in ANIMALS} for kind, n in place.items()}
    known["legs"] = {animal: {0: "no", 2: "two", 4: "four", 6: "six"}[int(n)] for animal, n in known["legs"].items()}
    known |= {"colour": COLOURS, "use": USES, "taste": TASTES, "opposite": OPPOSITES, "capital": CAPITALS}
    known["next"] = dict(zip(DAYS, DAYS[1:] + DAYS[:1])) | dict(zip(MONTHS, MONTHS[1:] + MONTHS[:1]))
    pairs = itertools.product(range(1, 10), repeat=2)
    known["sum"] = {f"{NUMBERS[a]} plus {NUMBERS[b]}": NUMBERS[a + b] for a, b in pairs}
    return known


# Twenty questions written down before the training; none of them stands in its text.
FIXED = [
    ("What sound does a cow make?", "moo"), ("Where does a bear live?", "cave"), ("What does a monkey like to eat?", "bananas"),
    ("What do we call a young cat?", "kitten"), ("How many legs does a bee have?", "six"), ("What is the color of coal?", "black"),
    ("What is a key used for?", "opening doors"), ("How does vinegar taste?", "sour"), ("What is the opposite of early?", "late"),
    ("What is the capital of Japan?", "Tokyo"), ("What comes after Tuesday?", "Wednesday"), ("What is two plus three?", "five"),
    ("Tell me the sound of a frog.", "croak"), ("Where does a horse live?", "stable"), ("Tell me the capital of Norway.", "Oslo"),
    ("Which color is a pumpkin?", "orange"), ("What do we use a broom for?", "sweeping"), ("What is the opposite of loud?", "quiet"),
    ("What comes after August?", "September"), ("How much is four plus four?", "eight"),
]  # fmt: skip

# Questions whose words and patterns are both strange to it; reported beside the foreign ones of known patterns.
STRANGE = [
    "Which river flows through Budapest?", "My shoes are too tight, what now?", "Please translate this letter into Dutch.",
    "Did anybody win the lottery yesterday?", "Sing a song about pirates.", "What is the square root of nineteen?",
    "Are ghosts real?", "Which phone should my sister buy?", "How tall is the highest mountain?", "Make me laugh.",
    "Who painted the ceiling of that chapel?", "Plan a holiday in Iceland for us.", "What rhymes with silver?",
    "Summarize the news of this week.", "Why do stars twinkle at night?", "Recommend a good restaurant nearby.",
    "How do submarines dive?", "Spell the word necessary.", "Is it going to rain tomorrow?", "What does my dream mean?",
]  # fmt: skip

REFUSALS = [
    "I am only a tiny model, so I do not know that.",
    "Sorry, I am a tiny model and cannot answer that.",
    "That is too hard for me. I am just a tiny model.",
]

_TOPICS = [
    "the stock market", "quantum physics", "my computer", "the Roman army", "a rocket engine", "modern art", "the law",
    "French poetry", "a divorce", "the brain", "black holes", "the economy", "chess", "football", "democracy", "photography",
    "the internet", "electric cars", "a guitar", "marketing", "evolution", "the moon landing", "taxes", "jazz", "medicine",
    "a novel", "gravity", "the Bible", "climate change", "a sonnet", "philosophy", "an essay", "bacteria", "atoms", "opera",
    "yoga", "tennis", "insurance", "vaccines", "robots", "diamonds", "volcanoes", "dinosaurs", "satellites", "plastic",
    "a passport", "batteries", "blockchain", "algebra", "the Middle Ages", "a speech", "software", "the weather", "a war",
]  # fmt: skip
_PEOPLE = [
    "Napoleon", "Einstein", "Shakespeare", "the president", "Mozart", "Cleopatra", "Newton", "Picasso", "Darwin", "Plato",
    "the king of England", "my neighbor", "Gandhi", "Columbus", "Lincoln", "Homer", "Beethoven", "my teacher", "Caesar",
]  # fmt: skip
_DEEDS = [
    "write code in Python", "fix a car", "bake a pizza", "buy a house", "learn Chinese", "lose weight", "build a website",
    "play the piano", "invest money", "get a job", "fly a plane", "repair a phone", "grow tomatoes", "dance the tango",
    "cook rice", "train for a marathon", "tie a tie", "write a poem", "sell a car", "sleep better", "draw a portrait",
]  # fmt: skip
_PLACES = [
    "London",
    "Mars",
    "Chicago",
    "Texas",
    "the bank",
    "my town",
    "Sydney",
    "Hollywood",
    "the office",
    "Mexico",
    "Dubai",
]
FOREIGN = {
    "topic": ["Explain {x} to me.", "What is {x}?", "Tell me about {x}.", "Why is {x} important?", "How does {x} work?",
              "Who invented {x}?", "Write an essay about {x}.", "What do you think about {x}?", "Give me a summary of {x}.",
              "What is the history of {x}?", "Is {x} dangerous?", "When did {x} begin?", "How much does {x} cost?",
              "What are the parts of {x}?", "Compare {x} with something else.", "Where can I read about {x}?"],
    "person": ["Who was {x}?", "When was {x} born?", "Where did {x} die?", "What did {x} say?", "How old is {x}?",
               "Why is {x} famous?", "What is the name of the wife of {x}?", "Write a letter to {x}."],
    "deed": ["How do I {x}?", "Can you {x}?", "Teach me to {x}.", "What is the best way to {x}?", "Where can I {x}?",
             "Should I {x}?", "Help me to {x}.", "How long does it take to {x}?", "Why would I {x}?"],
    "place": ["How far is it to {x}?", "How many people live in {x}?", "What is the weather in {x}?", "How do I get to {x}?",
              "Who is the mayor of {x}?", "What time is it in {x}?", "Where can I eat in {x}?"],
}  # fmt: skip
FOREIGN_WORDS = {"topic": _TOPICS, "person": _PEOPLE, "deed": _DEEDS, "place": _PLACES}


def normal(question: str) -> str:
    """A question as it is compared: lower case, letters and single spaces only."""
    return " ".join(re.sub(r"[^a-z0-9]+", " ", question.lower()).split())


def written(texts: list[str]) -> str:
    """Texts as one normal string in which `written([question]) in ...` finds a question, also within another."""
    return "|".join(f" {normal(text)} " for text in texts)


Question = tuple[str, str, str]  # text, answer, the words that a right answer holds


def questions() -> list[Question]:
    """Every known fact in every known form."""
    made = []
    for kind, table in facts().items():
        forms, answer = FORMS[kind]
        for x, y in table.items():
            made += [(tidy(form.format(x=x)), tidy(answer.format(x=x, y=y)), y) for form in forms]
    return made


def untrained() -> list[Question]:
    """Every known fact in a form that no training text has."""
    return [
        (tidy(UNTRAINED[kind].format(x=x)), tidy(FORMS[kind][1].format(x=x, y=y)), y)
        for kind, table in facts().items()
        for x, y in table.items()
    ]


def foreign() -> list[str]:
    """Questions about what it does not know."""
    return [tidy(f.format(x=x)) for kind, forms in FOREIGN.items() for f in forms for x in FOREIGN_WORDS[kind]]


def tidy(text: str) -> str:
    """a owl -> an owl, and a capital at the beginning."""
    text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)
    return text[0].upper() + text[1:]


def split(seed: int) -> tuple[list[Question], list[Question], list[str], list[str]]:
    """Questions and foreign ones, for training and held out; no text is in both, the fixed ones are held out."""
    draw = random.Random(seed)
    fixed = {normal(text) for text, _ in FIXED}
    train: list[Question] = []
    held: list[Question] = []
    for question in questions():
        (held if normal(question[0]) in fixed or draw.random() < 0.2 else train).append(question)
    kept: list[str] = []
    strange: list[str] = []
    for text in foreign():
        (strange if draw.random() < 0.15 else kept).append(text)
    known = written([text for text, *_ in train] + kept)  # "What follows April?" is also a part of "Tell me what ..."
    held = [question for question in held if written([question[0]]) not in known]
    return train, held, kept, [text for text in strange if written([text]) not in known]


# ---------------------------------------------------------------------------------------- stories

GIRLS = "Mia Lily Anna Emma Lucy Rosa Nina Clara Ella Sara Ruby Ivy Jane Molly Zoe".split()
BOYS = "Tom Ben Max Sam Leo Tim Jack Paul Finn Oscar Hugo Adam Noah Peter Luke".split()
_ADJ = "little kind brave quiet clever cheerful curious gentle".split()
_FRIENDS = [
    "a small dog", "a gray cat", "a white rabbit", "a brown bear", "a red fox", "a green frog", "a tiny mouse", "an old owl",
    "a young goat", "a fat duck", "a yellow bird", "a wise turtle",
]  # fmt: skip
_THINGS = [
    "red kite", "blue ball", "silver key", "wooden boat", "soft blanket", "shiny stone", "golden bell", "paper hat",
    "green scarf", "toy train", "glass marble", "warm coat",
]  # fmt: skip
_WHERE = [
    "the park", "the forest", "the garden", "the river", "the lake", "the old mill", "the hill", "the beach", "the market",
    "the farm", "the meadow", "the bridge",
]  # fmt: skip
_HOMES = [
    "a small village",
    "a little house near the sea",
    "a big town",
    "a farm",
    "a cottage in the woods",
    "a tall house",
]
_WEATHER = ["The sun was shining.", "It was a windy morning.", "The air was cold and clear.", "Soft rain was falling.",
            "The birds were singing.", "White clouds moved over the sky."]  # fmt: skip
_FOODS = ["a warm pie", "sweet apples", "bread and honey", "hot soup", "a big cake", "ripe berries"]
_ENDS = [
    "{N} went home with a happy heart.", "That night, {N} slept very well.", "From then on, they met every day.",
    "{N} never forgot that day.", "{N} smiled all the way home.", "And {N} was happy again.",
    "It was the best day that {N} could remember.", "{N} told {p} mother all about it.",
]  # fmt: skip
_LESSONS = ["It is good to share.", "A friend is worth more than gold.", "Small steps can go far.", "It is good to ask for help.",
            "Kind words cost nothing.", "Even a small one can be brave."]  # fmt: skip


class Tale:
    """One story's choices: who, with whom, what and where."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        girl = draw.random() < 0.5
        self.name = draw.choice(GIRLS if girl else BOYS)
        self.friend = draw.choice(_FRIENDS)
        self.words = {
            "N": self.name, "k": "girl" if girl else "boy", "s": "she" if girl else "he", "S": "She" if girl else "He",
            "p": "her" if girl else "his", "o": "her" if girl else "him", "a": draw.choice(_ADJ), "f": self.friend,
            "F": "the " + self.friend.split(" ", 1)[1], "t": draw.choice(_THINGS), "w": draw.choice(_WHERE),
            "h": draw.choice(_HOMES), "e": draw.choice(_FOODS), "q": draw.choice(_WEATHER),
        }  # fmt: skip
        self.words["w2"] = draw.choice([place for place in _WHERE if place != self.words["w"]])

    def say(self, *options: str) -> str:
        """One of the sentences, filled in."""
        text = self.draw.choice(options).format(**self.words)
        text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
        return text[0].upper() + text[1:]

    def opening(self) -> str:
        return self.say(
            "Once upon a time, there was a {a} {k} named {N}.", "Once upon a time, a {a} {k} named {N} lived in {h}.",
            "One day, a {k} named {N} went to {w}.", "In {h} lived a {a} {k} named {N}.", "{N} was a {a} {k} who lived in {h}.",
            "There once was a {k} named {N}.", "Long ago, there lived a {a} {k} named {N}.", "{N} had a {t}.",
            "One morning, {N} woke up early.",
        )  # fmt: skip


def _lost(tale: Tale) -> list[str]:
    return [
        tale.say("{N} had a {t} and took it everywhere.", "More than anything, {N} loved {p} {t}."),
        tale.say("One day, {N} lost the {t} near {w}.", "But one day, the {t} was gone."),
        tale.say("{N} looked under the bed and behind the door.", "{N} looked for it all day long."),
        tale.say("{S} felt sad and began to cry.", "{S} did not know what to do."),
        tale.say("Then {N} met {f}.", "Just then, {f} came along."),
        tale.say('"Why are you so sad?" asked {F}.', '"Can I help you?" asked {F}.'),
        tale.say('"I lost my {t}," said {N}.'),
        tale.say("Together they went to {w2}.", "They looked and looked until they came to {w2}."),
        tale.say("There, under a tree, was the {t}!", "There it was, behind a big stone!"),
        tale.say('"Thank you!" said {N}.', "{N} gave {F} a big hug."),
    ]


def _help(tale: Tale) -> list[str]:
    return [
        tale.say("{q} {N} walked to {w}.", "{q} {N} wanted to play at {w}."),
        tale.say("There {s} saw {f}.", "On the way, {s} met {f}."),
        tale.say("{F} was stuck in the mud.", "{F} was hungry and cold.", "{F} had hurt a foot."),
        tale.say('"Please help me," said {F}.', '"Can you help me?" asked {F}.'),
        tale.say("{N} was a little afraid, but {s} did not run away.", "{N} did not wait for a moment."),
        tale.say("{S} pulled and pulled until {F} was free.", "{S} gave {F} {e} and a warm place to rest.",
                 "{S} took {F} home and cared for it."),
        tale.say("Soon {F} felt much better.", "After a while, {F} could jump and play."),
        tale.say("{N} and {F} became good friends.", '"You are my friend now," said {F}.'),
    ]  # fmt: skip


def _share(tale: Tale) -> list[str]:
    return [
        tale.say("One day, {p} mother made {e}.", "One day, {N} had {e} in a basket."),
        tale.say("{N} wanted to eat it all alone.", "It smelled so good that {N} could not wait."),
        tale.say("On the way to {w}, {s} met {f}.", "Near {w}, {f} was sitting in the grass."),
        tale.say('"I have not eaten all day," said {F}.', '"I am so hungry," said {F}.'),
        tale.say("{N} thought about it for a while.", "{N} looked at the basket and at {F}."),
        tale.say('"Here, let us share," said {N}.', "Then {N} gave half of it to {F}."),
        tale.say("They sat down and ate together.", "They ate under a tall tree and told each other stories."),
        tale.say("It tasted better than ever.", "{F} danced with joy."),
        tale.say(*_LESSONS),
    ]


def _brave(tale: Tale) -> list[str]:
    return [
        tale.say("{N} was afraid of the dark.", "{N} was afraid of loud noises."),
        tale.say("One night, there was a strange sound at the door.", "One night, a strange sound came from {w}."),
        tale.say("{N} pulled the blanket over {p} head.", "{N} held {p} {t} very tight."),
        tale.say('"Who is there?" {s} asked.', "Then {s} took a lamp and opened the door."),
        tale.say("It was only {f}!", "There stood {f}, wet and cold."),
        tale.say('"I lost my way," said {F}.', '"I cannot find my home," said {F}.'),
        tale.say("{N} laughed and let it in.", "{N} was not afraid any more."),
        tale.say("They drank warm milk and sat by the fire.", "In the morning, {N} took {F} back to {w2}."),
        tale.say(*_LESSONS),
    ]


def _make(tale: Tale) -> list[str]:
    return [
        tale.say("{q}", "It was a special day."),
        tale.say("{N} wanted to make a gift for {p} grandmother.", "{N} wanted to give {p} grandfather a gift."),
        tale.say("But {s} had no money at all.", "But {s} did not know what to make."),
        tale.say("So {N} asked {f} for help.", "Then {f} came by and had an idea."),
        tale.say("They went to {w} and found flowers and leaves.", "They worked all day at {w}."),
        tale.say("Out of them they made a {t}.", "In the evening, they had made a {t}."),
        tale.say("It was not perfect, but it was full of love.", "It was the finest {t} in the land."),
        tale.say("At home, they were so glad that they cried a little.", "Everyone at home clapped and cheered."),
    ]


def _race(tale: Tale) -> list[str]:
    return [
        tale.say("One day, {N} met {f} at {w}.", "{N} and {f} often played at {w}."),
        tale.say('"Let us run to {w2}," said {F}.', '"I am faster than you," said {F}.'),
        tale.say("They began to run.", "One, two, three, and off they went!"),
        tale.say("{N} was fast, but {F} was faster.", "At first, {F} was far ahead."),
        tale.say("Then {F} fell over a stone.", "Then {F} stopped to rest under a tree."),
        tale.say("{N} could have won the race.", "{N} saw it and stopped."),
        tale.say("But {s} went back to help {F}.", "{S} took {F} by the hand."),
        tale.say("They came to {w2} side by side.", "So they both won the race."),
        tale.say(*_LESSONS),
    ]


_PLOTS = [_lost, _help, _share, _brave, _make, _race]


def story(draw: random.Random) -> str:
    """One story; its hero has a name, the friend is an animal without one."""
    tale = Tale(draw)
    return " ".join([tale.opening(), *draw.choice(_PLOTS)(tale), tale.say(*_ENDS)])


SYSTEMS = ["Answer in one short sentence.", "You are a kind helper.", "Be brief.", "You answer questions of children."]


def dialogs(draw: random.Random, train: list[Question], kept: list[str]) -> Iterator[list[str]]:
    """Endless dialogs, question, answer, question, answer, ...; a quarter of the questions are foreign."""
    by_kind: dict[str, list[Question]] = {}
    kinds = {tidy(form.format(x=x)): kind for kind, t in facts().items() for x in t for form in FORMS[kind][0]}
    for question in train:
        by_kind.setdefault(kinds[question[0]], []).append(question)
    while True:
        turns = []
        for _ in range(draw.choice([1, 1, 1, 1, 1, 1, 2, 3])):
            if draw.random() < 0.25:
                turns += [draw.choice(kept), draw.choice(REFUSALS)]
            else:  # all facts are equally likely, but sums, of which there are most, no more than others
                pool = by_kind["sum"] if draw.random() < 0.15 else train
                text, answer, _ = draw.choice(pool)
                turns += [text, answer]
        if draw.random() < 0.15:
            turns[0] = f"<<SYS>>\n{draw.choice(SYSTEMS)}\n<</SYS>>\n\n{turns[0]}"
        yield turns
