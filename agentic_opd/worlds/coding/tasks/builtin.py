"""The eight built-in tasks, each with public examples, hidden tests and a reference solution."""

from dataclasses import dataclass

from agentic_opd.core.text import text_lines
from agentic_opd.core.types import Task
from agentic_opd.worlds.coding.tasks.example_files import TEST_FILE, builtin_file


@dataclass(frozen=True, slots=True)
class BuiltinSpec:
    """A task in short form; examples and hidden checks are expressions `call == expected`."""

    signature: str
    statement: str
    examples: str
    hidden: str
    reference: str

    def to_task(self, *, with_examples: bool) -> Task:
        """Return the task, with its examples and the file that runs them, or without both."""
        entry_point = self.signature.partition("(")[0]
        examples = text_lines(self.examples.strip())
        hidden = "".join(f"assert {check.strip()}\n" for check in text_lines(self.hidden.strip().replace(";", "\n")))
        shown = "\n".join(line.strip() for line in examples)
        return Task(
            task_id=f"builtin/{entry_point}",
            prompt=f"Write `{self.signature}` in solution.py: {self.statement}"
            + (f"\n\nExamples ({TEST_FILE} runs them):\n{shown}" if with_examples else ""),
            hidden_tests=f"from solution import {entry_point}\n\n{hidden}",
            entry_point=entry_point,
            files={TEST_FILE: builtin_file(entry_point, examples)} if with_examples else {},
            reference_solution=self.reference.lstrip("\n"),
        )


def builtin_tasks(*, with_examples: bool = True) -> list[Task]:
    """Return the eight tasks in a fixed order; without examples the agent has no tests to run."""
    return [spec.to_task(with_examples=with_examples) for spec in _SPECS]


_SPECS = (
    BuiltinSpec(
        signature="fizzbuzz(n)",
        statement="return 'Fizz' if n is divisible by 3, 'Buzz' if by 5, 'FizzBuzz' if by both, else str(n).",
        examples="""
            fizzbuzz(3) == 'Fizz'
            fizzbuzz(10) == 'Buzz'
            fizzbuzz(15) == 'FizzBuzz'
            fizzbuzz(7) == '7'
        """,
        hidden="""
            fizzbuzz(1) == '1'; fizzbuzz(2) == '2'; fizzbuzz(5) == 'Buzz'; fizzbuzz(6) == 'Fizz'
            fizzbuzz(9) == 'Fizz'; fizzbuzz(20) == 'Buzz'; fizzbuzz(30) == 'FizzBuzz'
            fizzbuzz(45) == 'FizzBuzz'; fizzbuzz(98) == '98'; fizzbuzz(99) == 'Fizz'
            fizzbuzz(100) == 'Buzz'; fizzbuzz(0) == 'FizzBuzz'
        """,
        reference="""
def fizzbuzz(n):
    if n % 15 == 0:
        return 'FizzBuzz'
    if n % 3 == 0:
        return 'Fizz'
    if n % 5 == 0:
        return 'Buzz'
    return str(n)
""",
    ),
    BuiltinSpec(
        signature="is_palindrome(s)",
        statement="return True if s reads the same both ways, looking only at letters and digits and ignoring case, "
        "else False.",
        examples="""
            is_palindrome('level') == True
            is_palindrome('hello') == False
            is_palindrome('A man, a plan, a canal: Panama') == True
        """,
        hidden="""
            is_palindrome('') == True; is_palindrome('a') == True; is_palindrome('ab') == False
            is_palindrome('Aa') == True; is_palindrome('noon') == True
            is_palindrome('race a car') == False; is_palindrome('No lemon, no melon') == True
            is_palindrome('12321') == True; is_palindrome('1231') == False
            is_palindrome('0P') == False; is_palindrome('.,!') == True
            is_palindrome('A man') == False
        """,
        reference="""
def is_palindrome(s):
    chars = [c.lower() for c in s if c.isalnum()]
    return chars == chars[::-1]
""",
    ),
    BuiltinSpec(
        signature="two_sum(nums, target)",
        statement="return [i, j] with i < j and nums[i] + nums[j] == target, or [] if there is no such pair. "
        "There is at most one.",
        examples="""
            two_sum([2, 7, 11, 15], 9) == [0, 1]
            two_sum([3, 2, 4], 6) == [1, 2]
            two_sum([1, 2], 5) == []
        """,
        hidden="""
            two_sum([3, 3], 6) == [0, 1]; two_sum([], 0) == []; two_sum([5], 5) == []
            two_sum([5], 10) == []; two_sum([1, 2, 3, 4], 7) == [2, 3]
            two_sum([0, 4, 3, 0], 0) == [0, 3]; two_sum([-1, -2, -3, -4], -7) == [2, 3]
            two_sum([-3, 4, 3, 90], 0) == [0, 2]; two_sum([1, 5, 9], 14) == [1, 2]
            two_sum([1, 5, 9], 10) == [0, 2]; two_sum([1, 2, 3], 100) == []
            two_sum([10, 20, 30, 45], 50) == [1, 2]
        """,
        reference="""
def two_sum(nums, target):
    seen = {}
    for j, value in enumerate(nums):
        if target - value in seen:
            return [seen[target - value], j]
        seen[value] = j
    return []
""",
    ),
    BuiltinSpec(
        signature="flatten(items)",
        statement="return one flat list of all values in items, whose lists may be nested to any depth, in order.",
        examples="""
            flatten([1, [2, 3]]) == [1, 2, 3]
            flatten([[1, [2]], 3]) == [1, 2, 3]
            flatten([]) == []
        """,
        hidden="""
            flatten([1, 2]) == [1, 2]; flatten([[1], [2], [3]]) == [1, 2, 3]
            flatten([[[[1]]]]) == [1]; flatten([[], [[]]]) == []
            flatten([1, [2, [3, [4, [5]]]]]) == [1, 2, 3, 4, 5]
            flatten([[[1, 2], 3], [4, [5, 6]]]) == [1, 2, 3, 4, 5, 6]
            flatten(['ab', ['cd']]) == ['ab', 'cd']; flatten([0, [None, False]]) == [0, None, False]
            flatten([[3, 1], [2, 1]]) == [3, 1, 2, 1]; flatten([(1, 2), [3]]) == [(1, 2), 3]
        """,
        reference="""
def flatten(items):
    flat = []
    for item in items:
        if isinstance(item, list):
            flat.extend(flatten(item))
        else:
            flat.append(item)
    return flat
""",
    ),
    BuiltinSpec(
        signature="longest_common_prefix(words)",
        statement="return the longest prefix that all words share, '' if there is none or no word.",
        examples="""
            longest_common_prefix(['flower', 'flow', 'flight']) == 'fl'
            longest_common_prefix(['dog', 'car']) == ''
            longest_common_prefix(['same', 'same']) == 'same'
        """,
        hidden="""
            longest_common_prefix([]) == ''; longest_common_prefix(['']) == ''
            longest_common_prefix(['one']) == 'one'; longest_common_prefix(['a', '']) == ''
            longest_common_prefix(['', 'a']) == ''
            longest_common_prefix(['ab', 'abc', 'abcd']) == 'ab'
            longest_common_prefix(['abcd', 'abc', 'ab']) == 'ab'
            longest_common_prefix(['abc', 'xbc']) == ''
            longest_common_prefix(['abxd', 'abyd']) == 'ab'
            longest_common_prefix(['Ab', 'ab']) == ''
            longest_common_prefix(['aa', 'a', 'aaa']) == 'a'
        """,
        reference="""
def longest_common_prefix(words):
    if not words:
        return ''
    prefix = words[0]
    for word in words[1:]:
        while not word.startswith(prefix):
            prefix = prefix[:-1]
    return prefix
""",
    ),
    BuiltinSpec(
        signature="group_anagrams(words)",
        statement="return a list of groups of words that are anagrams of each other; groups in the order of their "
        "first word, words in the order given.",
        examples="""
            group_anagrams(['eat', 'tea', 'tan']) == [['eat', 'tea'], ['tan']]
            group_anagrams(['ab', 'c', 'ba']) == [['ab', 'ba'], ['c']]
            group_anagrams([]) == []
        """,
        hidden="""
            group_anagrams(['']) == [['']]; group_anagrams(['a']) == [['a']]
            group_anagrams(['a', 'a']) == [['a', 'a']]; group_anagrams(['b', 'a']) == [['b'], ['a']]
            group_anagrams(['tan', 'nat', 'eat', 'ate']) == [['tan', 'nat'], ['eat', 'ate']]
            group_anagrams(['eat', 'tan', 'ate', 'nat']) == [['eat', 'ate'], ['tan', 'nat']]
            group_anagrams(['aab', 'abb']) == [['aab'], ['abb']]
            group_anagrams(['abc', 'bca', 'cab', 'xyz']) == [['abc', 'bca', 'cab'], ['xyz']]
            group_anagrams(['Ab', 'ba']) == [['Ab'], ['ba']]
            group_anagrams(['', 'b', '']) == [['', ''], ['b']]
        """,
        reference="""
def group_anagrams(words):
    groups = {}
    for word in words:
        groups.setdefault(''.join(sorted(word)), []).append(word)
    return list(groups.values())
""",
    ),
    BuiltinSpec(
        signature="valid_parentheses(s)",
        statement="return True if every bracket of ()[]{} in s is closed by its own kind in the right order, "
        "else False. Other characters do not matter.",
        examples="""
            valid_parentheses('()[]') == True
            valid_parentheses('(]') == False
            valid_parentheses('f(x[0])') == True
        """,
        hidden="""
            valid_parentheses('') == True; valid_parentheses('(') == False
            valid_parentheses(')') == False; valid_parentheses('{[()]}') == True
            valid_parentheses('([)]') == False; valid_parentheses('(()') == False
            valid_parentheses('())') == False; valid_parentheses(')(') == False
            valid_parentheses('abc') == True; valid_parentheses('a{b}c]') == False
            valid_parentheses('[[[]]]{}') == True; valid_parentheses('{a: [1, (2)]}') == True
        """,
        reference="""
def valid_parentheses(s):
    closing = {')': '(', ']': '[', '}': '{'}
    stack = []
    for c in s:
        if c in '([{':
            stack.append(c)
        elif c in closing:
            if not stack or stack.pop() != closing[c]:
                return False
    return not stack
""",
    ),
    BuiltinSpec(
        signature="merge_intervals(intervals)",
        statement="return the [start, end] intervals sorted by start, with those that overlap or touch merged.",
        examples="""
            merge_intervals([[1, 3], [2, 6], [8, 10]]) == [[1, 6], [8, 10]]
            merge_intervals([[1, 4], [4, 5]]) == [[1, 5]]
            merge_intervals([[5, 6], [1, 2]]) == [[1, 2], [5, 6]]
        """,
        hidden="""
            merge_intervals([]) == []; merge_intervals([[1, 2]]) == [[1, 2]]
            merge_intervals([[1, 10], [2, 3]]) == [[1, 10]]
            merge_intervals([[2, 3], [1, 10]]) == [[1, 10]]
            merge_intervals([[1, 4], [0, 4]]) == [[0, 4]]
            merge_intervals([[1, 4], [0, 0]]) == [[0, 0], [1, 4]]
            merge_intervals([[1, 2], [1, 2]]) == [[1, 2]]
            merge_intervals([[1, 2], [3, 4]]) == [[1, 2], [3, 4]]
            merge_intervals([[1, 3], [3, 5], [5, 7]]) == [[1, 7]]
            merge_intervals([[6, 8], [1, 9], [2, 4], [10, 11]]) == [[1, 9], [10, 11]]
            merge_intervals([[-5, -1], [-2, 0]]) == [[-5, 0]]
        """,
        reference="""
def merge_intervals(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
""",
    ),
)
