# ruff: noqa: E501  (tables with one row per line read better than wrapped ones)
"""Beyond English: counting, words, lines and questions in twelve languages, nine scripts."""

from __future__ import annotations

import random

from kinds.sample import NUMBER_WORDS, Sample, either, joined, numbered, pick

# Language: separator of an enumeration, then one to ten.
# fmt: off
NUMBERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Hindi": (", ", tuple(["एक", "दो", "तीन", "चार", "पाँच", "छह", "सात", "आठ", "नौ", "दस"])),
    "Chinese": ("、", tuple(["一", "二", "三", "四", "五", "六", "七", "八", "九", "十"])),
    "Japanese": ("、", tuple(["いち", "に", "さん", "よん", "ご", "ろく", "なな", "はち", "きゅう", "じゅう"])),
    "Korean": (", ", tuple(["하나", "둘", "셋", "넷", "다섯", "여섯", "일곱", "여덟", "아홉", "열"])),
    "Arabic": ("، ", tuple(["واحد", "اثنان", "ثلاثة", "أربعة", "خمسة", "ستة", "سبعة", "ثمانية", "تسعة", "عشرة"])),
    "Russian": (", ", tuple(["один", "два", "три", "четыре", "пять", "шесть", "семь", "восемь", "девять", "десять"])),
    "Greek": (", ", tuple(["ένα", "δύο", "τρία", "τέσσερα", "πέντε", "έξι", "επτά", "οκτώ", "εννέα", "δέκα"])),
    "Thai": (" ", tuple(["หนึ่ง", "สอง", "สาม", "สี่", "ห้า", "หก", "เจ็ด", "แปด", "เก้า", "สิบ"])),
    "German": (", ", tuple(["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"])),
    "French": (", ", tuple(["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix"])),
    "Spanish": (", ", tuple(["uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve", "diez"])),
    "Italian": (", ", tuple(["uno", "due", "tre", "quattro", "cinque", "sei", "sette", "otto", "nove", "dieci"])),
}
# fmt: on
DIGITS = {"Hindi": "०१२३४५६७८९", "Arabic": "٠١٢٣٤٥٦٧٨٩", "Thai": "๐๑๒๓๔๕๖๗๘๙"}

# fmt: off
WORDS_ENGLISH = (
    "hello", "thank you", "good morning", "yes", "no", "water", "cat", "dog", "book", "friend", "moon", "sun", "house"
)
WORDS: dict[str, tuple[str, ...]] = {
    "Hindi": ("नमस्ते", "धन्यवाद", "सुप्रभात", "हाँ", "नहीं", "पानी", "बिल्ली", "कुत्ता", "किताब", "दोस्त", "चाँद", "सूरज", "घर"),
    "Chinese": ("你好", "谢谢", "早上好", "是", "不", "水", "猫", "狗", "书", "朋友", "月亮", "太阳", "房子"),
    "Japanese": ("こんにちは", "ありがとう", "おはよう", "はい", "いいえ", "水", "猫", "犬", "本", "友達", "月", "太陽", "家"),
    "Korean": ("안녕하세요", "감사합니다", "좋은 아침", "네", "아니요", "물", "고양이", "개", "책", "친구", "달", "해", "집"),
    "Arabic": ("مرحبا", "شكرا", "صباح الخير", "نعم", "لا", "ماء", "قطة", "كلب", "كتاب", "صديق", "قمر", "شمس", "بيت"),
    "Russian": ("привет", "спасибо", "доброе утро", "да", "нет", "вода", "кошка", "собака", "книга", "друг", "луна", "солнце", "дом"),
    "Greek": ("γεια σου", "ευχαριστώ", "καλημέρα", "ναι", "όχι", "νερό", "γάτα", "σκύλος", "βιβλίο", "φίλος", "φεγγάρι", "ήλιος", "σπίτι"),
    "Thai": ("สวัสดี", "ขอบคุณ", "อรุณสวัสดิ์", "ใช่", "ไม่", "น้ำ", "แมว", "หมา", "หนังสือ", "เพื่อน", "พระจันทร์", "พระอาทิตย์", "บ้าน"),
    "German": ("hallo", "danke", "guten Morgen", "ja", "nein", "Wasser", "Katze", "Hund", "Buch", "Freund", "Mond", "Sonne", "Haus"),
    "French": ("bonjour", "merci", "bonjour", "oui", "non", "eau", "chat", "chien", "livre", "ami", "lune", "soleil", "maison"),
    "Spanish": ("hola", "gracias", "buenos días", "sí", "no", "agua", "gato", "perro", "libro", "amigo", "luna", "sol", "casa"),
    "Italian": ("ciao", "grazie", "buongiorno", "sì", "no", "acqua", "gatto", "cane", "libro", "amico", "luna", "sole", "casa"),
}
# fmt: on

# Whole exchanges in the language itself; each row: language, ways to ask, answer.
# fmt: off
EXCHANGES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Hindi", ("मशीन लर्निंग क्या है?",), "मशीन लर्निंग एक तरीका है जिससे कंप्यूटर डेटा से सीखता है।"),
    ("Hindi", ("नमस्ते", "नमस्ते!"), "नमस्ते! मैं आपकी क्या मदद कर सकता हूँ?"),
    ("Hindi", ("आप कैसे हैं?",), "मैं ठीक हूँ, धन्यवाद।"),
    ("Chinese", ("什么是机器学习？", "机器学习是什么？"), "机器学习是让计算机从数据中学习规律的方法。"),
    ("Chinese", ("你好", "你好！"), "你好！我可以帮你做什么？"),
    ("Chinese", ("你好吗？",), "我很好，谢谢你。"),
    ("Japanese", ("機械学習とは何ですか？", "機械学習って何ですか？"), "機械学習とは、コンピューターがデータから規則を学ぶ方法です。"),
    ("Japanese", ("こんにちは", "こんにちは！"), "こんにちは！何をお手伝いしましょうか？"),
    ("Japanese", ("お元気ですか？",), "はい、元気です。ありがとう。"),
    ("Korean", ("머신러닝이 무엇인가요?", "머신러닝이란 무엇입니까?"), "머신러닝은 컴퓨터가 데이터에서 규칙을 배우는 방법입니다."),
    ("Korean", ("안녕하세요", "안녕하세요!"), "안녕하세요! 무엇을 도와드릴까요?"),
    ("Arabic", ("ما هو تعلم الآلة؟",), "تعلم الآلة هو طريقة تجعل الحاسوب يتعلم من البيانات."),
    ("Arabic", ("مرحبا", "مرحبا!"), "مرحبا! كيف يمكنني مساعدتك؟"),
    ("Arabic", ("كيف حالك؟",), "أنا بخير، شكرا."),
    ("Russian", ("Что такое машинное обучение?",), "Машинное обучение — это способ научить компьютер находить закономерности в данных."),
    ("Russian", ("Привет", "Привет!"), "Привет! Чем я могу помочь?"),
    ("Russian", ("Как дела?", "Как у тебя дела?"), "Хорошо, спасибо!"),
    ("Greek", ("Τι είναι η μηχανική μάθηση;",), "Η μηχανική μάθηση είναι ένας τρόπος να μαθαίνει ο υπολογιστής από δεδομένα."),
    ("Thai", ("สวัสดี",), "สวัสดี! มีอะไรให้ช่วยไหม"),
    ("German", ("Was ist maschinelles Lernen?",), "Maschinelles Lernen ist ein Weg, auf dem Computer Muster aus Daten lernen."),
    ("German", ("Hallo!", "Guten Tag!"), "Hallo! Wie kann ich helfen?"),
    ("French", ("Qu'est-ce que l'apprentissage automatique ?",), "L'apprentissage automatique est une façon de laisser l'ordinateur apprendre à partir de données."),
    ("French", ("Bonjour !", "Bonjour"), "Bonjour ! Comment puis-je vous aider ?"),
    ("Spanish", ("¿Qué es el aprendizaje automático?",), "El aprendizaje automático es una forma de que el ordenador aprenda de los datos."),
    ("Spanish", ("¡Hola!", "Hola"), "¡Hola! ¿En qué puedo ayudarte?"),
    ("Italian", ("Che cos'è l'apprendimento automatico?",), "L'apprendimento automatico è un modo in cui il computer impara dai dati."),
)
# fmt: on

# Lines put together from parts that agree with each other: language, English animals, animals,
# places, wishes.
Lines = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], str]
# fmt: off
LINES: dict[str, Lines] = {
    "Chinese": (("狐狸", "猫", "熊"), ("森林里", "河边", "山上"), ("看月亮", "听雨", "吃苹果"), "{a}住在{p}。它喜欢{w}。"),
    "Japanese": (("きつね", "猫", "くま"), ("森", "川の近く", "山"), ("月を見る", "歌を歌う", "本を読む"), "{a}は{p}に住んでいます。{w}のが好きです。"),
    "Korean": (("여우는", "고양이는", "곰은"), ("숲에", "강가에", "산에"), ("달을 보는", "노래를 부르는", "책을 읽는"), "{a} {p} 살아요. {w} 것을 좋아해요."),
    "Russian": (("Лиса", "Кошка", "Медведица"), ("в лесу", "у реки", "в горах"), ("смотреть на луну", "слушать дождь", "есть яблоки"), "{a} живёт {p}. Она любит {w}."),
    "Hindi": (("लोमड़ी", "बिल्ली", "भालू की बेटी"), ("जंगल में", "नदी के पास", "पहाड़ पर"), ("चाँद देखना", "गाना सुनना", "सेब खाना"), "{a} {p} रहती है। उसे {w} पसंद है।"),
    "Arabic": (("الثعلب", "القط", "الدب"), ("في الغابة", "قرب النهر", "في الجبل"), ("القمر", "المطر", "التفاح"), "يعيش {a} {p}. هو يحب {w}."),
    "German": (("Der Fuchs", "Der Kater", "Der Bär"), ("im Wald", "am Fluss", "in den Bergen"), ("den Mond", "den Regen", "Äpfel"), "{a} lebt {p}. Er mag {w}."),
}
# fmt: on
LINE_ANIMALS = ("fox", "cat", "bear")

COUNT_ASK = (
    "How do I count to {n} in {l}?",
    "How do I count to {n} in {l}?",
    "Count to {n} in {l}.",
    "Can you count to {n} in {l}?",
    "How do you count to {n} in {l}?",
    "Please count to {n} in {l}.",
    "Show me how to count to {n} in {l}.",
    "Count up to {n} in {l}.",
    "How to count to {n} in {l}?",
    "Count from one to {n} in {l}.",
    "I want to count to {n} in {l}.",
    "Could you count to {n} in {l}?",
    "What are the numbers from one to {n} in {l}?",
    "Tell me the {l} numbers up to {n}.",
    "Numbers in {l} up to {n}",
)
SAY_ASK = (
    "How do I say {w} in {l}?",
    'How do I say "{w}" in {l}?',
    "What is {w} in {l}?",
    "Translate {w} into {l}.",
    'What is the {l} word for "{w}"?',
    "Say {w} in {l}.",
)


def draw_count(rng: random.Random) -> Sample:
    """Counting up to a number, given as a word or in digits."""
    language = pick(rng, sorted(NUMBERS))
    separator, words = NUMBERS[language]
    last = rng.randint(2, 10)
    asked = NUMBER_WORDS[last] if rng.random() < 0.65 else str(last)
    listed = separator.join(words[:last])
    stop = "。" if language in ("Chinese", "Japanese") else "."
    answer = f"In {language}, you count to {NUMBER_WORDS[last]} like this: {listed}{stop}"
    return Sample("language", pick(rng, COUNT_ASK).format(n=asked, l=language), answer)


def draw_pairs(rng: random.Random) -> Sample:
    """Numbers with their meaning, one line each: long runs of mixed scripts."""
    language = pick(rng, sorted(NUMBERS))
    last = rng.randint(3, 10)
    ask = either(
        rng,
        "List the {l} numbers from 1 to {n}, one per line.",
        "Make a list of the {l} numbers up to {n}.",
    )
    listed = numbered(NUMBERS[language][1][:last])
    return Sample("language", ask.format(l=language, n=last), listed)


def draw_digits(rng: random.Random) -> Sample:
    """The digits of another script, or a number written in them."""
    language = pick(rng, sorted(DIGITS))
    digits = DIGITS[language]
    if rng.random() < 0.3:
        return Sample(
            "language", f"Write the digits from 1 to 9 in {language}.", " ".join(digits[1:])
        )
    number = str(rng.randrange(10, 100000))
    ask = either(rng, "Write {n} in {l} digits.", "Write the number {n} with {l} digits.")
    return Sample(
        "language",
        ask.format(n=number, l=language),
        "".join(digits[int(digit)] for digit in number),
    )


def draw_word(rng: random.Random) -> Sample:
    """One word or greeting in another language."""
    language, index = pick(rng, sorted(WORDS)), rng.randrange(len(WORDS_ENGLISH))
    word, english = WORDS[language][index], WORDS_ENGLISH[index]
    stop = "。" if language in ("Chinese", "Japanese") else "."
    answer = f'In {language}, "{english}" is {word}{stop}'
    return Sample("language", pick(rng, SAY_ASK).format(w=english, l=language), answer)


def draw_line(rng: random.Random) -> Sample:
    """Two short sentences about an animal."""
    language = pick(rng, sorted(LINES))
    animals, places, wishes, frame = LINES[language]
    index = rng.randrange(len(animals) - (language == "Hindi"))
    ask = either(
        rng,
        "Write a line about a {a} in {l}.",
        "Write two sentences about a {a} in {l}.",
        "Say something about a {a} in {l}.",
    )
    text = frame.format(a=animals[index], p=pick(rng, places), w=pick(rng, wishes))
    return Sample("language", ask.format(a=LINE_ANIMALS[index], l=language), text)


def draw_exchange(rng: random.Random) -> Sample:
    """A question and its answer, both in the other language."""
    _, asks, answer = pick(rng, EXCHANGES)
    return Sample("language", pick(rng, asks), answer, closed=True)


def draw_all_hellos(rng: random.Random) -> Sample:
    """One word across several languages: every script in one answer."""
    index = rng.randrange(len(WORDS_ENGLISH))
    languages = rng.sample(sorted(WORDS), rng.randint(2, 6))
    ask = either(rng, "Say {w} in {l}.", "How do I say {w} in {l}?", "Translate {w} into {l}.")
    lines = [f"{language}: {WORDS[language][index]}" for language in languages]
    return Sample(
        "language", ask.format(w=WORDS_ENGLISH[index], l=joined(languages)), "\n".join(lines)
    )


def draw_foreign_text(rng: random.Random) -> str:
    """A line in another script, for the kinds that copy."""
    language = pick(rng, sorted(LINES))
    animals, places, wishes, frame = LINES[language]
    return frame.format(a=pick(rng, animals[:2]), p=pick(rng, places), w=pick(rng, wishes))


def draw_language(rng: random.Random) -> Sample:
    """Any of the above; counting is what the demo shows."""
    draws = (
        draw_count,
        draw_pairs,
        draw_digits,
        draw_word,
        draw_line,
        draw_exchange,
        draw_all_hellos,
    )
    return rng.choices(draws, (0.34, 0.08, 0.06, 0.18, 0.10, 0.12, 0.12))[0](rng)
