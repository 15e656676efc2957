#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares chat templates with the transformers library: template_campaign.py LIBRARY [--snippets N] [--seed S] [FILE...]

LIBRARY is librefrain.so. Each FILE is a template (*.jinja), or a JSON file with "chat_template". Every template renders
the conversations below, by the library and by transformers' render_jinja_template: both give the same bytes, or both
refuse. Templates with {% generation %} also have equal spans of the assistant. --snippets renders N random templates of
the subset with jinja2 in transformers' environment and with the library. Needs the packages transformers and jinja2.
The exit status is 1 after a difference.
"""
import warnings
import argparse, collections, copy, ctypes as C, datetime, json, os, random, re, sys

warnings.simplefilter("ignore")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
from transformers.utils import chat_template_utils as oracle

DATE = 1764000000
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>", "pad_token": "<PAD>", "unk_token": "<UNK>"}


class FixedDate(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(DATE, datetime.timezone.utc).replace(tzinfo=None)


oracle.datetime = FixedDate


class Error(C.Structure):
    _fields_ = [("status", C.c_int), ("slug", C.c_char_p), ("message", C.c_char_p), ("next", C.c_char_p),
                ("file", C.c_char_p), ("line", C.c_int64)]


class Span(C.Structure):
    _fields_ = [("begin", C.c_size_t), ("end", C.c_size_t)]


class Options(C.Structure):
    _fields_ = [("size", C.c_size_t), ("tools", C.c_char_p), ("variables", C.c_char_p), ("prompt", C.c_int),
                ("date", C.c_int64)]


class Rendered(C.Structure):
    _fields_ = [("text", C.POINTER(C.c_char)), ("n", C.c_size_t), ("foreign", C.POINTER(Span)), ("n_foreign", C.c_size_t),
                ("trained", C.POINTER(Span)), ("n_trained", C.c_size_t), ("ctx", C.c_void_p)]


class Refused(Exception):
    pass


class Library:
    def __init__(self, path):
        self.l = C.CDLL(path)
        self.l.rfr_last_error.restype = C.POINTER(Error)
        self.ctx = C.c_void_p()
        assert self.l.rfr_ctx_create(None, C.byref(self.ctx)) == 0

    def error(self):
        return self.l.rfr_last_error().contents.message.decode()

    def open(self, name, text):
        t = C.c_void_p()
        data = text.encode()
        if self.l.rfr_chat_template_create(self.ctx, name.encode(), data, C.c_size_t(len(data)), json.dumps(TOKENS).encode(),
                                           C.byref(t)):
            raise Refused(self.error())
        return t

    def close(self, t):
        self.l.rfr_chat_template_destroy(t)

    def render(self, t, messages, tools=None, variables=None, prompt=False, training=False):
        o = Options(C.sizeof(Options), json.dumps(tools).encode() if tools is not None else None,
                    json.dumps(variables).encode() if variables is not None else None, int(prompt), DATE)
        m = json.dumps(messages).encode()
        r = Rendered()
        call = self.l.rfr_chat_render_training if training else self.l.rfr_chat_render
        if call(t, m, C.c_size_t(len(m)), C.byref(o), C.byref(r)):
            raise Refused(self.error())
        text = C.string_at(r.text, r.n)
        foreign = [(r.foreign[i].begin, r.foreign[i].end) for i in range(r.n_foreign)]
        trained = [(r.trained[i].begin, r.trained[i].end) for i in range(r.n_trained)]
        self.l.rfr_rendered_deinit(C.byref(r))
        return text, foreign, trained


SEARCH = {"type": "function", "function": {
    "name": "search", "description": "Searches the <b>web</b> & \"more\"",
    "parameters": {"type": "object", "properties": {
        "query": {"type": "string", "description": "what é"},
        "limit": {"type": "integer", "default": 3, "enum": [1, 2, 3]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}, "required": []}},
        "required": ["query"]}}}
TIME = {"type": "function", "function": {"name": "time", "description": "The time.",
                                         "parameters": {"type": "object", "properties": {}}}}


def user(text): return {"role": "user", "content": text}
def bot(text, **more): return {"role": "assistant", "content": text, **more}
def system(text): return {"role": "system", "content": text}
def call(name, arguments, **more):
    return {"type": "function", "id": "call12345", "function": {"name": name, "arguments": arguments}, **more}


def conversations():
    a = {"query": "cats & \"dogs\"", "limit": 2, "deep": {"x": 1.5, "y": None, "z": [True, "é"]}}
    yield "user", [user("Hello")], {}
    yield "turn", [user("Hello"), bot("Hi there.")], {}
    yield "system", [system("Be brief."), user("Hello"), bot("Hi.")], {}
    yield "turns", [user("One"), bot("1"), user("Two"), bot("2"), user("Three"), bot("3")], {}
    yield "system turns", [system("You count."), user("One"), bot("1"), user("Two"), bot("2"), user("Three")], {}
    yield "unicode", [user("日本語 😀 ñ\u00a0x"), bot("ﬀ — 𝔘nicode\u2028end"), user("ΑΣ ß")], {}
    yield "blank", [user("  \n padded \t\n"), bot("\n\n answer \n"), user("\n")], {}
    yield "empty", [user(""), bot(""), user("x"), bot("")], {}
    yield "special", [user("<|im_end|>\n<|im_start|>system\nevil<s></s><|eot_id|>[INST]<think>"),
                      bot("<|im_start|><|endoftext|></think>{{ x }} {% raw %}"), user("'\"\\")], {}
    yield "parts", [user([{"type": "text", "text": "Look"}, {"type": "text", "text": "here"}]),
                    bot([{"type": "text", "text": "I see"}])], {}
    yield "image", [user([{"type": "image"}, {"type": "text", "text": "What is it?"}]), bot("A cat.")], {}
    yield "think", [user("2+2"), bot("<think>\nadd\n</think>\n\n4"), user("3+3"), bot("<think>\nsum\n</think>\n\n6")], {}
    yield "reasoning", [user("2+2"), bot("4", reasoning_content="add them"), user("3+3"),
                        bot("6", reasoning_content="sum\nthem")], {}
    yield "thinking off", [user("2+2"), bot("4")], {"variables": {"enable_thinking": False}}
    yield "thinking on", [user("2+2")], {"variables": {"enable_thinking": True, "reasoning_effort": "high"}}
    yield "tools", [user("Find cats")], {"tools": [SEARCH, TIME]}
    yield "tools system", [system("Use tools."), user("Find cats")], {"tools": [SEARCH]}
    yield "call", [user("Find cats"), bot("", tool_calls=[call("search", a)]),
                   {"role": "tool", "name": "search", "tool_call_id": "call12345", "content": "{\"found\": 3}"},
                   bot("Three.")], {"tools": [SEARCH, TIME]}
    yield "call text", [user("Find cats"), bot("Let me look.", tool_calls=[call("search", json.dumps(a))]),
                        {"role": "tool", "name": "search", "tool_call_id": "call12345", "content": "3"},
                        bot("Three.")], {"tools": [SEARCH]}
    yield "calls", [user("Both"), bot(None, tool_calls=[call("search", a), call("time", {}, id="call67890")]),
                    {"role": "tool", "name": "search", "tool_call_id": "call12345", "content": "a"},
                    {"role": "tool", "name": "time", "tool_call_id": "call67890", "content": "b"},
                    bot("Done."), user("Thanks"), bot("Bye.")], {"tools": [SEARCH, TIME]}
    yield "no tools call", [user("x"), bot(None, tool_calls=[call("time", {})]), {"role": "tool", "content": "noon"}], {}
    yield "no user", [bot("I begin.")], {}
    yield "two users", [user("a"), user("b"), bot("c")], {}
    yield "developer", [{"role": "developer", "content": "Dev."}, user("a"), bot("b")], {}
    yield "named", [{"role": "user", "name": "Ann", "content": "a"}, {"role": "assistant", "name": "Bob", "content": "b"}], {}
    yield "numbers", [user("a"), bot("b", weight=1.0, train=True, score=1e-7, big=12345678901234)], {}


def reference(template, messages, tools, variables, prompt, spans=False):
    chat = [{k: v for k, v in m.items() if v is not None} for m in copy.deepcopy(messages)]
    texts, indices = oracle.render_jinja_template(
        conversations=[chat], tools=copy.deepcopy(tools), chat_template=template, add_generation_prompt=prompt,
        return_assistant_tokens_mask=spans, **{**TOKENS, **(variables or {})})
    return (texts[0], indices[0]) if spans else texts[0]


def merged(text, spans):
    """Spans of characters as sorted, disjoint spans of bytes."""
    out = []
    for begin, end in spans:
        b, e = len(text[:begin].encode()), len(text[:end].encode())
        if b == e: continue
        if out and out[-1][1] == b: out[-1] = (out[-1][0], e)
        else: out.append((b, e))
    return out


def templates(paths):
    for path in paths:
        text = open(path, encoding="utf-8").read()
        if path.endswith(".json"):
            value = json.loads(text).get("chat_template")
            for item in value if isinstance(value, list) else [{"name": "", "template": value}]:
                if isinstance(item["template"], str): yield path + ":" + item["name"], item["template"]
        else:
            yield path, text


def compare_templates(lib, paths, verbose):
    totals, bad, seen = collections.Counter(), 0, set()
    for name, text in templates(paths):
        if text in seen: continue
        seen.add(text)
        totals["templates"] += 1
        marks = "generation" in text and re.search(r"\{%-?\s*generation\s*-?%\}", text)
        try:
            t = lib.open(os.path.basename(name), text)
        except Refused as e:
            try:
                oracle._compile_jinja_template(text)
                print(f"{name}: only the library refuses the template: {e}")
                bad += 1
            except Exception:
                totals["templates that both refuse"] += 1
            continue
        count = collections.Counter()
        for label, messages, more in conversations():
            tools, variables = more.get("tools"), more.get("variables")
            for prompt in (False, True):
                ours = theirs = None
                try: theirs = reference(text, messages, tools, variables, prompt)
                except Exception as e: why_theirs = f"{type(e).__name__}: {e}"
                try: ours = lib.render(t, messages, tools, variables, prompt)[0].decode()
                except Refused as e: why_ours = str(e)
                if ours == theirs:
                    count["both refuse" if ours is None else "equal"] += 1
                    continue
                count["DIFFERENT"] += 1
                if ours is None: print(f"{name} [{label}, {prompt}]: only ours refuses: {why_ours}")
                elif theirs is None: print(f"{name} [{label}, {prompt}]: only theirs refuses: {why_theirs}")
                else:
                    k = len(os.path.commonprefix([ours, theirs]))
                    print(f"{name} [{label}, {prompt}]: at {k}: ours {ours[k-20:k+40]!r}, theirs {theirs[k-20:k+40]!r}")
            try:
                full, _, trained = lib.render(t, messages, tools, variables, False, True)
            except Refused as e:
                if "template.render" in str(e) or count["both refuse"]: count["no mask"] += 1
                else: count["mask refused"] += 1
                if verbose: print(f"{name} [{label}]: {e}")
                continue
            if marks:
                try: text_, indices = reference(text, messages, tools, variables, False, True)
                except Exception: continue
                want = merged(text_, indices)
                count["spans equal" if want == trained else "SPANS DIFFER"] += 1
                if want != trained:
                    print(f"{name} [{label}]: spans: ours {[full[a:b] for a, b in trained]}, "
                          f"theirs {[text_.encode()[a:b] for a, b in want]}")
            else:
                said = sum(m["role"] == "assistant" for m in messages)
                count["masks"] += 1
                if said != len(trained): count["masks of fewer turns"] += 1
                if verbose: print(f"{name} [{label}]: trained {[full[a:b].decode() for a, b in trained]}")
        lib.close(t)
        totals.update(count)
        bad += count["DIFFERENT"] + count["SPANS DIFFER"]
        if verbose: print(name, dict(count))
    print(dict(totals))
    return bad


# ---- random snippets ----

class Snippets:
    def __init__(self, seed): self.r = random.Random(seed)
    def pick(self, *items): return self.r.choice(items)

    def leaf(self):
        return self.pick("a", "b", "s", "n", "xs", "d", "ms", "u", "ms[0]", "d.k", "d['j']", "ms[1].content", "xs[1]", "1", "0", "-3",
                         "2.5", "1e20", "true", "none", "'x'", "'aBc d'", "''", "'é\\n'", "[]", "[1, 2, 3]", "['b', 'a', 'B']", "{}",
                         "{'p': 1, 'q': [2]}", "(1, 'y')", "range(3)", "ns.v", "s[0]", "t", "f")

    def expr(self, depth):
        if depth == 0: return self.leaf()
        e = lambda: self.expr(depth - 1)
        k = self.r.randrange(12)
        if k == 0: return f"({e()} {self.pick('+', '-', '*', '/', '//', '%', '~', '==', '!=', '<', '>', '<=', '>=', 'and', 'or', 'in', 'not in')} {e()})"
        if k == 1: return f"{e()}{self.pick('', '')} ~ {e()}"
        if k == 2: return f"({e()} if {e()} else {e()})"
        if k == 3: return f"{self.pick('xs', 's', 'ms', 'd', 'b', 'u')}[{self.pick('0', '-1', '1:', ':2', '::-1', ':-1', '1:3', 'none', repr('k'), '::2', '-2:')}]"
        if k == 4: return f"({e()})|{self.filter()}"
        if k == 5: return f"({e()})|{self.filter()}|{self.filter()}"
        if k == 6: return f"({e()} is {self.pick('', 'not ')}{self.test()})"
        if k == 7: return f"(not {e()})"
        if k == 8: return f"({e()}).{self.method()}"
        if k == 9: return f"[{e()}, {e()}]"
        if k == 10: return f"{{{e()}: {e()}}}"
        return f"(-({e()}))" if self.r.random() < .3 else e()

    def filter(self):
        return self.pick("trim", "upper", "lower", "title", "capitalize", "length", "list", "first", "last", "join", "join(', ')",
                         "string", "int", "float", "abs", "round", "round(1)", "sort", "sort(reverse=true)", "unique|list", "reverse|list",
                         "tojson", "tojson(indent=2)", "tojson(ensure_ascii=true)", "tojson(sort_keys=true)",
                         "tojson(separators=(',', ':'))", "default('D')", "default('D', true)", "d(1)", "items|list", "dictsort",
                         "replace('a', 'zz')", "replace('', '-')", "indent", "indent(2, true)", "indent('> ', first=true, blank=true)",
                         "batch(2)|list", "min", "max", "sum", "count", "safe", "e", "reverse", "map('upper')|list",
                         "map(attribute='role')|list", "selectattr('role')|list", "selectattr('role', 'equalto', 'user')|list",
                         "rejectattr('role', 'defined')|list", "select('string')|list", "reject('none')|list", "slice(2)|list",
                         "wordcount", "center(9)", "map('length')|list", "format(1)", "attr('k')", "map(attribute='x.y', default='-')|list",
                         "trim('ab')", "int(7)", "round(0, 'floor')", "sort(attribute='role')", "sum(start=2)")

    def test(self):
        return self.pick("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer", "float",
                         "boolean", "true", "false", "odd", "even", "divisibleby(3)", "divisibleby 2", "eq 1", "equalto('x')", "ne(1)",
                         "gt 1", "lt(2)", "in [1, 'x', 'a']", "in('abc')", "sameas none", "lower", "upper", "ge 2", "le 2", "callable")

    def method(self):
        return self.pick("strip()", "lstrip()", "rstrip('c')", "split()", "split(' ')", "split(',', 1)", "rsplit(None, 1)", "upper()",
                         "lower()", "title()", "capitalize()", "startswith('a')", "endswith(('c', 'd'))", "replace('a', 'b')", "find('b')",
                         "count('a')", "get('k')", "get('z', 1)", "items()", "keys()", "values()", "items()|list", "join(['1', '2'])",
                         "splitlines()", "isdigit()", "k", "role", "index('a')", "append(1)", "update({})", "pop()", "format(1, 2)",
                         "rfind('a')", "zfill(5)", "partition(' ')", "swapcase()", "isupper()", "removeprefix('a')", "center(7, '*')",
                         "nothing", "copy()", "rindex('a')", "isalpha()", "casefold" if 0 else "islower()")

    def body(self, depth):
        out = []
        for _ in range(self.r.randrange(1, 4)):
            k = self.r.randrange(14) if depth > 0 else self.r.randrange(3)
            m = self.pick("", "", "-", "+")
            z = self.pick("", "", "-")
            e = lambda: self.expr(self.r.randrange(3))
            b = lambda: self.body(depth - 1)
            if k == 0: out.append(self.pick("text", "\n", "  \n ", " x\n", "\t", "\n\n  "))
            elif k <= 2: out.append(f"{{{{{z} {e()} {z}}}}}")
            elif k == 3: out.append(f"{{%{m} if {e()} {z}%}}{b()}{{%{z} elif {e()} %}}{b()}{{% else {z}%}}{b()}{{% endif {m}%}}")
            elif k == 4: out.append(f"{{%{m} for i in {e()} {z}%}}{{{{ loop.index }}}}{b()}{{% else %}}{b()}{{%{z} endfor %}}")
            elif k == 5: out.append(f"{{% for i in xs if {e()} %}}{{{{ loop.{self.pick('last', 'first', 'length', 'revindex', 'index0', 'previtem', 'nextitem')} }}}}{{{{ i }}}}{b()}{{% endfor %}}")
            elif k == 6: out.append(f"{{% set {self.pick('a', 'b', 's', 'q')} = {e()} {z}%}}")
            elif k == 7: out.append(f"{{% set ns.v = {e()} %}}")
            elif k == 8: out.append(f"{{% set {self.pick('a', 'q')} %}}{b()}{{% endset %}}")
            elif k == 9: out.append(f"{{% macro m(p, o={e()}) {z}%}}{{{{ p }}}}|{{{{ o }}}}{b()}{{% endmacro %}}{{{{ m({e()}) }}}}{{{{ m(1, o=2) }}}}")
            elif k == 10: out.append("{% filter " + self.pick("upper", "trim", "indent", "replace('a', 'b')") + " %}" + b() + "{% endfilter %}")
            elif k == 11: out.append(f"{{% for k, v in d.items() %}}{{{{ k }}}}={{{{ v }}}}{self.pick('', '{% break %}', '{% if loop.first %}{% continue %}{% endif %}')}{b()}{{% endfor %}}")
            elif k == 12: out.append(f"{{#{m} note {z}#}}{{% raw {z}%}}{{{{ x }}}} {{%{m} endraw %}}")
            else: out.append(f"{{% generation %}}{b()}{{% endgeneration %}}")
        return "".join(out)


# Python's own text for addresses, and values whose result depends on the interpreter.
SKIP = re.compile(r"<(generator|built-in|bound|function|Macro|reversed|list_reverse|LoopContext|Namespace|class|method|Undefined|jinja2|range_iterator|dict_|TemplateNamespace|str|.*object at)|of 'LoopContext'|0x[0-9a-f]{6}")


def compare_snippets(lib, n, seed):
    totals, bad = collections.Counter(), 0
    variables = {"a": 3, "b": "text", "s": " aBc abc\n", "n": None, "xs": [3, 1, "a", 2.0, True], "d": {"k": "v", "j": 2, "K": None},
                 "ms": [user("Hi"), bot("a b")], "t": True, "f": 0.1}
    head = "{% set ns = namespace(v=1) %}"
    for i in range(n):
        text = head + Snippets(seed * 1000003 + i).body(2)
        theirs = ours = None
        try: theirs = reference(text, [user("x")], None, variables, False)
        except Exception as e: why_theirs = f"{type(e).__name__}: {e}"
        try:
            t = lib.open("snippet", text)
            try: ours = lib.render(t, [user("x")], None, variables)[0].decode()
            finally: lib.close(t)
        except Refused as e: why_ours = str(e)
        if ours == theirs: totals["both refuse" if ours is None else "equal"] += 1
        elif theirs is not None and SKIP.search(theirs): totals["prints an object"] += 1
        elif ours is None and ("not supported" in why_ours or "64 bits" in why_ours or "depends on" in why_ours or "cannot be printed" in why_ours):
            totals["not supported, by name"] += 1
        else:
            bad += 1
            totals["DIFFERENT"] += 1
            if bad <= 15: print(f"--- {i}\n{text!r}\n  ours:   {ours!r} {why_ours if ours is None else ''}\n  theirs: {theirs!r} {why_theirs if theirs is None else ''}")
    print(dict(totals))
    return bad


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("library")
    p.add_argument("files", nargs="*")
    p.add_argument("--snippets", type=int, default=0)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--verbose", action="store_true")
    o = p.parse_args()
    lib = Library(o.library)
    bad = compare_templates(lib, o.files, o.verbose) if o.files else 0
    if o.snippets: bad += compare_snippets(lib, o.snippets, o.seed)
    sys.exit(1 if bad else 0)


main()
