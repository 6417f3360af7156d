"""llama.cpp's grammars: what they match, and errors that point at the line that the caller wrote."""

import doctest

import llguidance
import pytest

from exl2nb.constraint import gbnf
from exl2nb.constraint.gbnf import is_lark, lark_of
from exl2nb.constraint.structure import Structure
from exl2nb.core.errors import StructureError
from tests.generator.fakes import TOKENIZER as WORDS
from tests.generator.fakes import VOCAB

JSON = r"""
# objects only
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def accepts(grammar: str, text: str) -> bool:
    """Whether a grammar matches a text, byte by byte."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(lark_of(grammar)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for byte in text.encode():
        if matcher.validate_tokens([byte]) != 1:
            return False
        matcher.consume_token(byte)
    return matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (r'root ::= "\u00e9"', ["é"], ["e", "u00e9"]),
        (r'root ::= "\xe9\xFF"', ["éÿ"], ["e"]),
        (r'root ::= "\U0001F600\U000000e9"', ["😀é"], ["😀"]),
        (r'root ::= "\n\t\r"', ["\n\t\r"], ["ntr"]),
        (r'root ::= "\\ \" \[ \]"', ['\\ " [ ]'], ['" [ ]']),
        (r'root ::= "a/b" [/] "+*?.|(){}^$#"', ["a/b/+*?.|(){}^$#"], ["a/b"]),
        ('root ::= "é" [ü-ÿ]', ["éý"], ["éa"]),
        (r"root ::= [\u3041-\u3096]+", ["ぁゖ"], ["a", ""]),
        (r"root ::= [\x41-\x43\n]", ["B", "\n"], ["D", "x"]),
        (r"root ::= [\U0001F600-\U0001F64F]", ["😀"], ["a"]),
        (r"root ::= [^\u00e9\n]", ["e", "ü"], ["é", "\n"]),
        (r"root ::= [\]\[\\^-]", ["]", "[", "\\", "^", "-"], ["a"]),
        ("root ::= [a-] [-a]", ["--", "aa"], ["b-"]),
        ("root ::= [^]", ["a", "\n"], [""]),
        ('root ::= ["/&&~-]', ['"', "/", "&", "~", "-"], ["a"]),
        ("root ::= .", ["a", "\n", "é"], ["", "ab"]),
        ('root ::= "a"{2} "b"{1,2} "c"{1,} "d"{0,1}', ["aabcd", "aabbcc"], ["abc", "aabbbc"]),
        ('root ::= "a"{ 1 , 2 }', ["a", "aa"], ["aaa"]),
        ('root ::= "a"* "b"+ "c"?', ["b", "aabbc"], ["a", "bcc"]),
        ('root ::= "a"?+ ("b" "c")*', ["", "aabcbc"], ["b"]),
        ('root ::= ("a" | ) ""', ["", "a"], ["b"]),
        ('root ::= "a" | # first\n  "b" # second\n  | "c"\n# end', ["a", "b", "c"], ["d"]),
        ('root ::= ( "a"\n "b" # in a group\n)\n', ["ab"], ["a"]),
        ('\r\nroot ::= x\r\nx ::= "q"\r\n', ["q"], ["x"]),
        ('root ::= a-b a_b A-B\na-b ::= "1"\na_b ::= "2"\nA-B ::= "3"', ["123"], ["111"]),
        ('root ::= start 1st\nstart ::= "s"\n1st ::= "1"', ["s1"], ["s"]),
        ('root ::= ("(" root ")")?', ["", "(())"], ["(()"]),
        ('root ::= list "."\nlist ::= "x" | list "," "x"', ["x.", "x,x."], ["x"]),
        ('root ::= word "x"\nword ::= [a-z]+', ["abx", "xx"], ["ab", "x"]),
        (JSON, ['{"a": [1, -2.5e3, "x\\"é\\u00e9", {}], "b": null}', "{}"], ['{"a": }', '{"a": "\n"}', "[]"]),
    ],
)
def test_what_grammars_match(grammar, right, wrong):
    assert not is_lark(grammar)
    for text in right:
        assert accepts(grammar, text), (text, lark_of(grammar))
    for text in wrong:
        assert not accepts(grammar, text), (text, lark_of(grammar))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root ::= "a', """line 1, column 10: this text is not closed; expected '"'; the line is 'root ::= "a'"""),
        ('root ::= x\nx ::= "a\nb"', "line 2, column 7: this text is not closed"),
        ("root ::= x\n\nx ::= [a", "line 3, column 7: this class is not closed"),
        ('root ::= (a "x"\na ::= "b"', "line 1, column 10: this group is not closed"),
        ('root ::= "a"\nx ::= "b" y', "line 2, column 11: rule 'y' not found"),
        ('roots ::= "a"', "there is no rule 'root'"),
        (r'root ::= "\q"', r"line 1, column 11: the escape \q is not known; expected \n"),
        (r'root ::= "\u00"', r"line 1, column 11: the escape \u00"),
        (r'root ::= "\ud83d\ude00"', r"the escape \ud83d is no character; write an emoji by one \U escape"),
        (r'root ::= "\U00110000"', r"the escape \U00110000 is no character"),
        ('root ::= "a\\', "the escape"),
        ("root ::= [z-a]", "the range 'z-a' ends before it begins"),
        ("root ::= []", "this class has no characters"),
        ('root ::= "a"{3,2}', "a maximum below its minimum"),
        ('root ::= "a"{,3}', "found ',3}'; expected a number"),
        ('root ::= "a"{999999999}', "expected at most"),
        ("root ::= *", "'*' repeats nothing"),
        ('root = "a"', "line 1, column 6: found '= \"a\"'; expected ::="),
        ('root ::= "a" )', "found ')'; expected the end of the rule"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3, column 1: rule 'root' is defined in line 1 already"),
        ("root ::= 'a'", 'found "\'"'),
        ("root ::= <think", "expected a token"),
        ("root ::= " + "(" * 200, "nested more than 100 deep"),
        ("", "there is no rule 'root'"),
    ],
)
def test_errors_point_at_the_line_of_the_caller(grammar, words):
    with pytest.raises(StructureError) as caught:
        lark_of(grammar)
    assert words in str(caught.value)


def test_rules_keep_their_lines():
    lines = lark_of('root ::= "(" inner\n\ninner ::=\n  root\n  | "x"\nend ::= "z"').split("\n")
    assert [line.partition(":")[0] for line in lines] == ["start", "", "inner", "", "", "END"]


def test_which_language_it_is():
    assert is_lark('start: "a"') and is_lark('%llguidance {}\nstart : "a"') and is_lark('x: "a"\n  start: x')
    assert not is_lark('root ::= start\nstart ::= "a"') and not is_lark('root ::= "start: x"')


def test_tokens_by_their_ids():
    (token,) = WORDS.encode("Z", add_special=False)
    constraint = Structure("grammar", f'root ::= <[{token}]>{{2}} "a"?', WORDS, VOCAB).start()
    assert [one for one in range(VOCAB) if one in constraint.allowed()] == [token]


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (r'root ::= "\u00e9" [a-c]', {"éa", "éb", "éc"}),
        (r'root ::= [\u0031-\u0033] "\x41"', {"1A", "2A", "3A"}),
        (r'root ::= "\"" [a-b] "\"\n"', {'"a"\n', '"b"\n'}),
    ],
)
def test_answers(grammar, texts, llm):
    assert {llm.generate("x", grammar=grammar, max_tokens=12, seed=seed).text for seed in range(4)} <= texts


def test_thousands_of_alternatives():
    made = Structure("grammar", "root ::= " + " | ".join(f'"number {number}"' for number in range(3000)), WORDS, VOCAB)
    constraint = made.start()
    for token in WORDS.encode("number 2917", add_special=False):
        constraint.accept(token)
    assert constraint.accepting


def test_the_example():
    assert doctest.testmod(gbnf).failed == 0
