"""The cleaning of captions that LlamaGen's text-conditional models were trained with.

The rules come from LlamaGen's language/t5.py, which has them from PixArt-alpha and DeepFloyd's IF, in their order
and stated anew. What depends on other packages is simpler here. ftfy's repair of text in the wrong encoding is left
out, but for its straight quotes, ligatures, full-width letters and control characters; HTML is parsed by the standard
library in place of Beautiful Soup.
"""
import html
import re
import unicodedata
from html.parser import HTMLParser
from urllib.parse import unquote_plus

DOMAIN = r"[a-z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
ENDINGS = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
DASHES = ("\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0\ufe31\ufe32"
          "\ufe58\ufe63\uff0d")

BEFORE_HTML = [(re.compile(pattern), by) for pattern, by in (
    ("<person>", "person"),
    (rf"\b(?:https?:(?:/{{1,3}}|[a-z0-9%])|{DOMAIN})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-z0-9%])|{DOMAIN})", ""),
)]
AFTER_HTML = [(re.compile(pattern), by) for pattern, by in (
    (r"@\w+\b", ""),                                        # names of users
    ("[\u31c0-\u4dff\u4e00-\u9fff]+", ""),                  # Chinese characters, and what Unicode has around them
    (f"[{DASHES}]+", "-"),
    ("[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    ("[\u2018\u2019]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),           # addresses of machines
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),                                          # a backslash and an n, as files of captions have them
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.(?:{ENDINGS})", ""),                           # names of files
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    ("[#\u00ae\u2022\u00a9\u2122&@\u00b7\u00ba\u00bd\u00be\u00bf\u00a1\u00a7~()\\[\\]{}|\\\\/*]+", " "),
    (r"\s+\.\s+", " "),
)]
AFTER_REPAIR = [(re.compile(pattern), by) for pattern, by in (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),                     # numbers of articles: jc6640, jc6640vc, 6640vc231
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{ENDINGS})(\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    ("\\b\\d+\\.?\\d*[x\u0445\u00d7]\\d+\\.?\\d*\\b", ""),  # sizes: 640x480
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)]
HYPHENS = re.compile("[-_]")
LIGATURES = dict(zip("\ufb00\ufb01\ufb02\ufb03\ufb04\ufb05\ufb06\u0133\u0132",
                     ("ff", "fi", "fl", "ffi", "ffl", "\u017ft", "st", "ij", "IJ")))
QUOTES = {ord(mark): by for marks, by in (("\u02bc\u2018\u2019\u201a\u201b", "'"), ("\u201c\u201d\u201e\u201f", '"'))
          for mark in marks}


class Text(HTMLParser):
    """What is between the tags of HTML."""

    def __init__(self, source: str):
        super().__init__()
        self.parts = []
        self.feed(source)
        self.close()

    def handle_data(self, data):
        self.parts.append(data)


def cleaned(caption: str) -> str:
    """The caption as LlamaGen gives it to T5: its rules are applied twice, for they uncover work for one another."""
    return clean_once(clean_once(caption))


def clean_once(caption: str) -> str:
    text = replaced(unquote_plus(caption).strip().lower(), BEFORE_HTML)
    text = replaced("".join(Text(text).parts), AFTER_HTML)
    if len(HYPHENS.findall(text)) > 3:  # this-is-my-cute-cat
        text = HYPHENS.sub(" ", text)
    return replaced(repaired(text), AFTER_REPAIR).strip()


def repaired(text: str) -> str:
    """What ftfy repairs in text that is otherwise well, and HTML's names of characters, twice."""
    text = html.unescape(text) if "<" not in text else text
    text = "".join(unicodedata.normalize("NFKC", c) if "\uff01" <= c <= "\uff9f" or c == "\u3000"
                   else LIGATURES.get(c, c) for c in text.translate(QUOTES))
    text = "".join(c for c in unicodedata.normalize("NFC", text)
                   if c in "\t\n\r" or not unicodedata.category(c) == "Cc")
    return html.unescape(html.unescape(text)).strip()


def replaced(text: str, rules: list[tuple[re.Pattern, str]]) -> str:
    for pattern, by in rules:
        text = pattern.sub(by, text)
    return text
