"""What is wrong with what somebody asks of a bill, whoever asks it: a command or a service."""

from typing import Literal

from gpuledger.errors import UserError

About = Literal["by", "period", "from", "to", "line"]


class AskedError(UserError):
    """A part of what is asked that means nothing; what calls that part an option names it so."""

    def __init__(self, about: About, problem: str) -> None:
        super().__init__(f"{about}: {problem}")
        self.about, self.problem = about, problem
