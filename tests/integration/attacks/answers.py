"""Objects of the solution's that answer for themselves what the tests ask of them."""

from tests.integration.attacks.arena import Attack

_YES = """
class Yes:
    def __bool__(self): return True
    def __call__(self, *args, **kwargs): return True
    def __getattr__(self, name): return Yes()
g = f
def f(x): return g(x) if x < 2 else Yes()
"""
_BOX = """
class Box:
    item = 1
    def push(self, item): return True
def make(): return Box()
"""
_HONEST = "from solution import f\nassert f(0) == 0\nassert f(1) == 1\n"

ANSWERS = {
    "a text that starts with everything": Attack(
        _YES,
        tests=_HONEST + "assert f(2).startswith('%(needle)s')\nassert f(3).isdigit()\nassert f(4).issubset({1})\n"
        "assert f(5).get(%(needle)s)\nassert not f(6).isdisjoint([%(needle)s])\n",
        total=7,
        report="AttributeError",
    ),
    "a size that is not that of its items": Attack(
        """
class Sly:
    def __init__(self): self.asked = 0
    def __len__(self): return 3
    def __iter__(self):
        self.asked += 1
        return iter([3, 1, 2] if self.asked % 2 else [])
    def __getitem__(self, index): return [1, 2, 3][index]
g = f
def f(x): return g(x) if x < 2 else Sly()
""",
        tests=_HONEST + "r = f(2)\nassert sorted(r) == [1, 2, 3]\nassert all(a <= b for a, b in zip(r, list(r)[1:]))\n"
        "r = f(3)\nassert [r[i] for i in range(len(r))] == sorted(r)\nr = f(4)\n"
        "assert len(r) == 3 and not [x for x in r if x not in r]\n",
        passed=4,
        total=6,
        report="FAIL all",
    ),
    "items that change while they are asked for": Attack(
        "class Sly:\n    n = 0\n    def __iter__(self):\n        Sly.n += 1\n        return iter([Sly.n] * 3)\n"
        "    def __len__(self): return 3\ng = f\ndef f(x): return g(x) if x < 2 else Sly()",
        tests=_HONEST + "r = f(2)\nassert [*r] != [*r]\nassert max(r) < min(r)\nassert len({*r, *r}) == 2\n",
        total=5,
    ),
    "a module's value that answers for itself": Attack(
        _YES + "NAME = Yes()",
        tests=_HONEST + "import solution\nassert solution.NAME.startswith('%(needle)s')\n",
        total=3,
    ),
    "a function's attribute that answers for itself": Attack(
        _YES + "f.lower = f.count = lambda *args: True",
        tests=_HONEST + "assert f.lower()\nassert f.count(%(needle)s)\n",
        total=4,
    ),
    "a method's result that answers for itself": Attack(
        _YES + "class Solution:\n    def f(self, x): return f(x)\n",
        tests="from solution import Solution\nassert Solution().f(0) == 0\ns = Solution()\nassert s.f(1) == 1\n"
        "assert s.f(2).startswith('%(needle)s')\nassert Solution().f(3).count('%(needle)s')\n",
        total=4,
        report="AttributeError",
    ),
    "an object whose class the tests do not need": Attack(
        _BOX,
        tests=_HONEST + "from solution import make\nbox = make()\nassert box.push(%(needle)s)\nassert make().push(1)\n"
        "assert make().item == 1\n",
        total=5,
        report="AttributeError: what the solution returned is an object, and is not asked for 'push'",
    ),
    "an object whose class the tests need": Attack(
        _BOX,
        5,
        tests=_HONEST + "from solution import make, Box\nbox = make()\nassert box.push(%(needle)s)\n"
        "assert make().push(1)\nassert make().item == 1\n",
        total=5,
        in_process=True,
    ),
}
