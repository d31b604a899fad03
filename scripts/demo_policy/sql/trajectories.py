"""Episodes of the SQL world -> the question about the whole trajectory, and its right answer.

schema() -> [schema() | query(sql)] -> answer(sql) -> [answer(sql)] -> an end      the verdict is on the last answer
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from agentic_opd.rollout.chat_format import ChatFormat
from demo_policy.sql.author import ENDS, SqlAuthor, call, drawn_questions
from demo_policy.sql.faults import WrongQuery, untaught
from demo_policy.sql.questions import Question, questions, sql
from demo_policy.trajectories import JudgedEpisode, trajectory_transcript
from demo_policy.transcripts import Transcript


@dataclass(frozen=True, slots=True)
class SqlTrajectoryMix:
    """How often an episode is what; probabilities in [0, 1]."""

    look: float = 0.5
    """A turn looks at the schema again, or at a table's rows; else nearly all answers would be of the second turn."""
    second_answer: float = 0.15
    """Another answer comes first, of which no verdict is given."""
    untaught: float = 0.35
    """The answer has a mistake that the policy is not taught, where there is room for one."""


class SqlTrajectories(SqlAuthor):
    """Writes the trajectory judge's transcripts in the SQL world."""

    def __init__(self, chat: ChatFormat, trajectory_mix: SqlTrajectoryMix | None = None) -> None:
        super().__init__(chat)
        self.trajectory_mix = trajectory_mix or SqlTrajectoryMix()
        self._held_out: Iterator[Question] | None = None

    def write(self, rng: Random) -> Iterator[Transcript]:
        """Write the question about one episode with its answer."""
        yield trajectory_transcript(self, self.draw(rng, held_out=False), rng)

    def draw(self, rng: Random, *, held_out: bool) -> JudgedEpisode:
        """See `demo_policy.trajectories.TrajectoryAuthor`."""
        question = self.next_question(rng, held_out=held_out)
        mistake = self.mistake(question, rng)
        if rng.random() < self.trajectory_mix.untaught:
            mistake = untaught(question.query, rng)
        return self.judged_episode(question, mistake, rng)

    def planted(self, rng: Random) -> JudgedEpisode:
        """See `demo_policy.trajectories.TrajectoryAuthor`."""
        while True:
            question = self.next_question(rng, held_out=True)
            mistake = self.mistake(question, rng) or untaught(question.query, rng)
            if mistake is not None and (judged := self.judged_episode(question, mistake, rng)).at_fault:
                return judged

    def next_question(self, rng: Random, *, held_out: bool) -> Question:
        """Draw a question to train on, or one whose schema or combination never occurs in training."""
        if held_out:
            self._held_out = self._held_out or questions(rng.getrandbits(32), held_out=True)
            return next(self._held_out)
        self._drawn = self._drawn or drawn_questions(rng, self.mix.made_up)
        return next(self._drawn)

    def judged_episode(self, question: Question, mistake: WrongQuery | None, rng: Random) -> JudgedEpisode:
        """Run an episode with this mistake in its last answer."""
        turns = [call("schema")]
        if rng.random() < self.trajectory_mix.look:
            rows = call("query", sql=f"SELECT * FROM {question.query.table.name} LIMIT 2")
            turns.append(rng.choice((call("schema"), rows)))
        written = mistake.sql if mistake else sql(question.query)
        if rng.random() < self.trajectory_mix.second_answer and (earlier := self.other_answer(question, written, rng)):
            turns.append(call("answer", sql=earlier))
        position = len(turns)
        episode = self.run(question, (*turns, call("answer", sql=written), rng.choice(ENDS)))
        is_right = episode.verification is not None and episode.verification.all_passed
        hints = {} if mistake is None or is_right else {position: mistake.hints}
        return JudgedEpisode(episode, hints, dict.fromkeys(hints, 1))

    def other_answer(self, question: Question, written: str, rng: Random) -> str | None:
        """Return an answer that is not the written one, or None."""
        if written != sql(question.query):
            return sql(question.query)
        mistake = untaught(question.query, rng)
        return mistake.sql if mistake else None
