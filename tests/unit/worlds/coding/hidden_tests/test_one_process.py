"""Which tests run apart from the solution, and which need its process, from their source alone.

Each source follows `from solution import f`.
"""
# ruff: noqa: E501 - one source a line

import pytest

from agentic_opd.worlds.coding.hidden_tests.checks import instrument

APART = {
    "round trip": "xs=[1,2]\nassert f(f(xs)) == xs\n",
    "decode": "from solution import enc, dec\nfor s in ['a','b']:\n    assert dec(enc(s)) == s\n",
    "sorted": "import random\nxs=[random.randint(0,9) for _ in range(5)]\nassert f(xs)==sorted(xs)\n",
    "deepcopy": "import copy\nxs=[[1],[2]]\nexpected=sum(map(len,xs))\nassert f(copy.deepcopy(xs))==expected\n",
    "key lambda": "assert sorted(f([1,2]), key=lambda v: -v) == [2,1]\n",
    "math": "import math\nassert math.isclose(f(math.pi), 3.0)\nassert f(math.sqrt(2), float('inf')) == 1\n",
    "np": "import numpy as np\nassert np.allclose(f([1.0]), [2.0])\n",
    "raises": "import pytest\ndef test_a():\n    with pytest.raises(ValueError) as e:\n        f(1)\n    assert 'x' in str(e.value)\n",
    "param": "import pytest\n@pytest.mark.parametrize('a,b',[(1,2),([1],[2])])\ndef test_a(a,b):\n    assert f(a)==b\n",
    "fixture": "import pytest\n@pytest.fixture\ndef data():\n    return [1,2,3]\ndef test_a(data):\n    assert f(data)==sum(data)\n",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.xs=[1,2]\n    def test_a(self):\n        self.assertEqual(f(self.xs), 3)\n        self.assertIsNone(f([]))\n        self.assertIsInstance(f([1]), int)\n",
    "string methods": "r=f(1)\nassert r.upper()=='A'\nassert r.split()[0].strip()=='a'\n",
    "dict items": "d=f({'a':1})\nassert sorted(d.items())==[('a',1)]\nassert d.get('a')==1\n",
    "isinstance": "assert isinstance(f(1),(list,tuple))\nassert type(f(1)) is list\nassert f(1) is None\n",
    "range arg": "assert f(range(5))==10\nassert f(x for x in [1,2])==3\nassert f(list(range(3)))==3\nassert f([i*i for i in range(3)])==5\n",
    "build": "def build(n):\n    out=[]\n    for i in range(n):\n        out.append([i]*n)\n    return out\nassert f(build(3))==3\n",
    "string module": "import string\nassert f(string.ascii_lowercase)==26\nassert f('a'.join(['b','c']))==2\n",
    "solution": "from solution import Solution\ns=Solution()\nassert s.f([1])==1\nassert Solution().g(2)==2\n",
    "json": "import json\nassert f(json.loads('[1]'))==1\n",
    "cases dict": "CASES=[{'in':[1],'out':2},{'in':[2],'out':3}]\nfor c in CASES:\n    assert f(c['in'])==c['out']\n",
    "dict cases": "for k,v in {1:2,3:4}.items():\n    assert f(k)==v\n",
    "zip": "ins=[[1],[2]]\nouts=[1,2]\nfor i,o in zip(ins,outs):\n    assert f(*i)==o\n",
    "kwargs": "cases=[((1,),{'b':2},3)]\nfor a,k,w in cases:\n    assert f(*a,**k)==w\n",
    "itertools": "from itertools import permutations\nfor p in permutations([1,2,3]):\n    assert f(list(p))==[1,2,3]\n    assert f(p)==6\n",
    "time": "import time\nt=time.time()\nf(10)\nassert time.time()-t<5\n",
    "enumerate": "for i,x in enumerate([[1],[2]]):\n    assert f(x)==i\n",
    "same arg twice": "xs=[3,1]\na=f(xs)\nb=f(xs)\nassert a==b\n",
    "len before": "xs=[3,1]\nassert len(xs)==2\nassert f(xs)==2\n",
    "rng": "import random\nrng=random.Random(3)\nfor _ in range(5):\n    xs=[rng.random() for _ in range(3)]\n    rng.shuffle(xs)\n    assert f(xs)==min(xs)\n",
    "seeded": "import random\nrandom.seed(3)\nxs=[random.random() for _ in range(3)]\nassert f(xs)==min(xs)\n",
    "set arg": "assert f({1,2},frozenset([1]),b'x',None,True,1j)==2\n",
    "negative": "assert f(-1,+2,not 3)==2\n",
    "try": "try:\n    f(-1)\n    assert False\nexcept (TypeError, ValueError):\n    pass\nassert f(1)==1\n",
    "with raises": "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.assertRaises(ValueError):\n            f(1)\n        self.assertRaises(ValueError, f, 2)\n        self.assertAlmostEqual(f(1), 2.0, places=3)\n",
    "alias": "candidate = f\nassert candidate(1)==1\n",
    "import as": "from solution import f as g\nimport solution as s\nassert g(1)==s.h(2)\n",
    "os.environ": "MAXV = 10**9+7\nassert f(MAXV)==1\nassert f(10**5)==1\n",
    "in": "assert f(1) in [1,2]\nassert 3 not in f(2)\nassert f(1) < 3 < f(5)\n",
    "another random": "import random\nassert random.Random(0).random() != f(2)\n",
}
"""Plain data is all that crosses."""

IN_PROCESS = {
    "lambda": "assert f(lambda x:x)==1\n",
    "func": "def g(x): return x\nassert f(g)==1\n",
    "builtin": "assert f(len,[1])==1\n",
    "counter": "from collections import Counter\nassert f(Counter('a'))==1\n",
    "deque": "from collections import deque\nd=deque([1])\nassert f(d)==1\n",
    "date": "import datetime\nassert f(datetime.date(2020,1,1))==1\n",
    "date result": "from datetime import date\nassert f(1)==date(2020,1,1)\n",
    "fraction": "from fractions import Fraction\nassert f(1)==Fraction(1,3)\n",
    "decimal": "from decimal import Decimal\nassert f(Decimal('1'))==1\n",
    "inplace sort": "xs=[2,1]\nf(xs)\nassert xs==[1,2]\n",
    "unchanged": "xs=[2,1]\nc=xs[:]\nassert f(xs)==[1,2]\nassert xs==c\n",
    "unchanged and": "xs=[2,1]\nassert f(xs)==[1,2] and xs==[2,1]\n",
    "identity": "xs=[1]\nassert f(xs) is xs\n",
    "not identity": "xs=[1]\nassert f(xs) is not xs\n",
    "check inplace": "def check(c):\n    a=[2,1]\n    c(a)\n    assert a==[1,2]\ncheck(f)\n",
    "row": "row=[1]\ng=[row]\nf(g)\nassert row==[2]\n",
    "tuple": "xs=[2,1]\nassert (f(xs), xs)==(None,[1,2])\n",
    "list after": "xs=[2,1]\nf(xs)\nout=list(xs)\nassert out==[1,2]\n",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        xs=[2,1]\n        f(xs)\n        self.assertEqual(xs,[1,2])\n",
    "setUp": "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.xs=[2,1]\n    def test(self):\n        f(self.xs)\n        self.assertEqual(self.xs,[1,2])\n",
    "pytest fixture": "import pytest\n@pytest.fixture\ndef xs(): return [2,1]\ndef test(xs):\n    f(xs)\n    assert xs==[1,2]\n",
    "grid elem": "g=[[1,0]]\nf(g)\nassert g[0][1]==0\n",
    "dict": "d={}\nf(d)\nassert d=={'a':1}\n",
    "len": "xs=[1,1]\nf(xs)\nassert len(xs)==1\n",
    "result prefix": "xs=[1,1,2]\nk=f(xs)\nassert k==2\nassert xs[:2]==[1,2]\n",
    "result prefix k": "xs=[1,1,2]\nk=f(xs)\nassert xs[:k]==[1,2]\n",
    "call result": "assert f(1)(2)==3\n",
    "call result var": "g=f(1)\nassert g(2)==3\n",
    "attr": "p=f(1)\nassert p.x==1\n",
    "method": "p=f(1)\np.push(1)\nassert p.pop()==1\n",
    "attr in list": "for p in f(1):\n    assert p.x==1\n",
    "cache": "f(1)\nassert f.cache_info().hits==0\n",
    "doc": "assert f.__doc__\n",
    "isinstance gen": "import types\nassert isinstance(f(1),types.GeneratorType)\n",
    "iter": "it=iter(f(1))\nassert next(it)==1\n",
    "object": "assert f(object())==1\n",
    "class": "class N: pass\nassert f(N())==1\n",
    "ellipsis": "assert f(...)==1\n",
    "namedtuple": "from collections import namedtuple\nP=namedtuple('P','x')\nassert f(P(1))==1\n",
    "re": "import re\nassert f(re.compile('a'),'a')\n",
    "operator": "import operator\nassert f(operator.add,1)==1\n",
    "method arg": "assert f(str.upper,'a')=='A'\nassert f('a'.upper)=='A'\n",
    "stringio": "import io\nassert f(io.StringIO('a'))==1\n",
    "dict of lambdas": "assert f({'a':lambda:1})==1\n",
    "partial": "from functools import partial\nassert f(partial(max,1))==1\n",
    "mock": "from unittest import mock\nassert f(mock.Mock())==1\n",
    "array": "import array\nassert f(array.array('i',[1]))==1\n",
    "uuid": "import uuid\nassert f(1)==uuid.UUID(int=1)\n",
    "path": "import pathlib\nassert f(pathlib.PurePath('a'))==1\n",
    "count": "import itertools\nassert f(itertools.count())==1\n",
    "ordered": "from collections import OrderedDict as O\nassert f(O(a=1))==1\n",
    "exception arg": "assert f(ValueError('x'))=='x'\n",
    "defaultdict": "from collections import defaultdict\nd=defaultdict(int)\nd['a']+=1\nassert f(d)==1\n",
    "sorted callback": "assert f([1,2],key=lambda x:-x)==1\n",
    "global": "import solution\nsolution.COUNT=0\nsolution.f()\nassert solution.COUNT==1\n",
    "append": "calls=[]\nf(calls.append)\nassert calls==[1]\n",
    "in loop": "for xs,want in [([2,1],[1,2])]:\n    f(xs)\n    assert xs==want\n",
    "args list": "for args,want in [(([2,1],),[1,2])]:\n    f(*args)\n    assert args[0]==want\n",
    "res none": "xs=[2,1]\nres=f(xs)\nassert res is None\nassert xs==[1,2]\n",
    "copy of": "xs=[2,1]\nbefore=list(xs)\nf(xs)\nassert xs==before\n",
    "sorted after": "xs=[2,1]\nf(xs)\nassert xs==sorted(xs)\n",
    "helper": "def ok(xs): return xs==[1,2]\nxs=[2,1]\nf(xs)\nassert ok(xs)\n",
    "attr in check": "def check(c):\n    p=c(1)\n    assert p.x==1\ncheck(f)\n",
    "attr of late alias": "def go():\n    p=g(1)\n    assert p.x==1\ng=f\ngo()\n",
    "run helper": "def run(xs):\n    f(xs)\n    return xs\nassert run([2,1])==[1,2]\n",
}
"""Functions, objects, attributes, identity, or changes in place."""


@pytest.mark.parametrize("source", APART.values(), ids=APART)
def test_tests_that_need_plain_data_only_run_apart(source: str) -> None:
    assert not instrument(f"from solution import f\n{source}").in_process


@pytest.mark.parametrize("source", IN_PROCESS.values(), ids=IN_PROCESS)
def test_tests_that_need_more_share_the_process(source: str) -> None:
    assert instrument(f"from solution import f\n{source}").in_process


def test_long_chains_and_deep_expressions_are_read_once() -> None:
    chain, sums = ".replace('a', 'b')" * 60, "(" * 60 + "f(1)" + " + 1)" * 60
    assert not instrument(f"from solution import f\nassert f(1){chain} == ''\nassert {sums} == 61\n").in_process


def test_values_behind_too_many_names_are_refused() -> None:
    def source(length: int) -> str:
        names = "".join(f"a{number} = a{number + 1}\n" for number in range(length))
        return f"from solution import f\n{names}a{length} = f(1)\nassert a0 == 1\n"

    assert instrument(source(20)).labels
    with pytest.raises(ValueError, match="more than 30 names"):
        instrument(source(200))
