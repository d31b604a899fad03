"""Objects of the solution's that would answer for themselves what the tests ask of them: none crosses."""

from tests.integration.attacks.arena import Attack

_YES = """
class Yes:
    def __bool__(self): return True
    def __call__(self, *args, **kwargs): return True
    def __getattr__(self, name): return Yes()
g = f
def f(x): return g(x) if x < 2 else Yes()
"""
_HONEST = "from solution import f\nassert f(0) == 0\nassert f(1) == 1\n"

ANSWERS = {
    "a text that starts with everything": Attack(
        _YES,
        tests=_HONEST + "assert f(2).startswith('%(needle)s')\nassert f(3).isdigit()\nassert f(4).issubset({1})\n"
        "assert f(5).get(%(needle)s)\nassert not f(6).isdisjoint([%(needle)s])\n",
        total=7,
        report="TypeError: the solution returned a Yes, which is not plain data",
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
        tests=_HONEST + "r = f(2)\nassert sorted(r) == [1, 2, 3] and len(r) == 3\nr = f(3)\n"
        "assert [r[i] for i in range(len(r))] == sorted(r)\nr = f(4)\n"
        "assert not [x for x in r if x not in r] and len(r)\n",
        total=5,
        report="TypeError",
    ),
    "a module's value that answers for itself": Attack(
        _YES + "NAME = Yes()\nclass Odd:\n    def __eq__(self, other): return True\nOTHER = Odd()",
        tests=_HONEST + "import solution\nassert solution.NAME == %(needle)s\nassert solution.OTHER == %(needle)s\n",
        total=4,
        report="TypeError: the solution returned a Odd",
    ),
    "a method's result that answers for itself": Attack(
        _YES + "class Solution:\n    def f(self, x): return f(x)\n",
        tests="from solution import Solution\nassert Solution().f(0) == 0\ns = Solution()\nassert s.f(1) == 1\n"
        "assert s.f(2).startswith('%(needle)s')\nassert Solution().f(3).count('%(needle)s')\n",
        total=4,
        report="TypeError",
    ),
    "an iterator that starts again": Attack(
        "class Again:\n    def __iter__(self): return iter([%(needle_guess)s, 3])\n    def __next__(self): return 1\n"
        "g = f\ndef f(x): return g(x) if x < 2 else Again()".replace("%(needle_guess)s", "7"),
        tests=_HONEST + "r = f(2)\nassert [*r] == [*r]\nassert f(3) == [%(needle)s]\n",
        total=4,
        report="expected",
    ),
}
