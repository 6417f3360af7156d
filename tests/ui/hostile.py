"""Texts that a model may produce and that a page must only ever show."""

TEXTS = {
    "script": "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'><svg onload='window.pwned = 1'>",
    "entities": "&lt;b&gt; &amp;amp; \"'`</textarea></div><!-- -->",
    "template": "${window.pwned = 1} {{ 7 * 7 }} javascript:alert(1)",
    "bidi": "user\u202e\u2066// gnp.exe\u2069 \u2067right\u2069 \u200f\u061c abc",
    "ansi": "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x00 \x08\x08 \x7f",
    "lone": "\ud83d half \ufeff\ufffd \u0301\u0301\u0301\u0301",
}
LONG = "x" * 1_000_000 + "<script>window.pwned = 1</script>"
