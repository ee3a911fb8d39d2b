"""The messages between the controller and its workers: typed, in msgpack, without pickle.

The coordinator's commands and events are sent as they are, some with data in an envelope
(`Envelope`); all others are `Message`s.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, dataclass_transform, get_args

import msgspec

from rhymeflow.core.commands import Command
from rhymeflow.core.events import Event
from rhymeflow.core.types import FinishReason, SuiteName, TrajectoryId, Version
from rhymeflow.environments.episode import Episode, TurnFigures, Until
from rhymeflow.histospec.draft import DraftStats, IndexHandle
from rhymeflow.reward.messages import TrainerState
from rhymeflow.utils import progress
from rhymeflow.weights.base import WeightHandle
from rhymeflow.workers.channel import Channel


@dataclass_transform(frozen_default=True)
class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages that are neither commands nor events."""


class Envelope(NamedTuple):
    """A command or an event, and the data that comes with it: see `DATA`."""

    what: Command | Event
    data: Any


class Continuation(msgspec.Struct, frozen=True, array_like=True):
    """With `Route`: a response to the prompt of data row `row` in `epoch`, to be continued after
    `tokens` of the policy and its environment. The policy's turn `turn`, from 1, began after
    `turn_start` of them. Commands for suites' responses have number 0.

    Of an agent it is one call, in the sequence that this continues; without a prompt it is none."""

    row: int
    epoch: int
    prompt_ids: list[int]
    tokens: list[int]
    turn: int = 1
    turn_start: int = 0
    suite: SuiteName = ""
    branch: int = 0
    """Of an agent: the number of the sequence, which has one call at a time."""
    until: Until = Until()
    row_prompt: list[int] | None = None
    """Of an agent; see `engine.base.Request`."""
    noise: int | None = None
    """What tells this turn's noise from others' of the prompt; None: the number of the member."""


class Status(msgspec.Struct, frozen=True, array_like=True):
    """With `Snapshot`: an instance's load, and totals since its start. Seconds are the run's: of an
    emulated cluster, if there is one."""

    running: int
    waiting: int
    tokens: int
    busy_seconds: float
    drafts: DraftStats
    behind_seconds: float = 0.0
    """See `engine.base.Load`."""


class LoadedModel(msgspec.Struct, frozen=True, array_like=True):
    """With `LearnerReady`: the model that is loaded, and where its weights are."""

    handle: WeightHandle
    device: str
    dtype: str  # compute precision, by torch's name
    max_length: int
    """Most tokens of a prompt and its response together."""
    checkpoint_bytes: int
    retrain_seconds: float = 0.0
    """How long it took to train again on the batches since the last checkpoint."""
    num_parameters: int = 0
    num_trained: int = 0  # those that are not frozen
    damaged: list[tuple[Version, str]] = []
    """Checkpoints that were skipped, each with its problem."""


class Publication(msgspec.Struct, frozen=True, array_like=True):
    """With `VersionPublished`: how long publishing took, and the weight store's metrics."""

    seconds: float
    metrics: dict[str, float] = {}


DATA: dict[str, Any] = {
    "Route": Continuation,
    "Pulled": float,  # its seconds
    "Snapshot": Status,
    "LearnerReady": LoadedModel,
    "VersionPublished": Publication,
}
"""The type of the data that comes with a command or event, by its name; all others have no data."""


# -- from the controller --------------------------------------------------------------------------


class Shutdown(Message):
    """To any worker: end."""


class ConnectWeights(Message):
    """To an instance: load the weights at `handle` and join."""

    handle: WeightHandle


class UseDrafter(Message):
    """To an instance: draft from this index from now on."""

    index: IndexHandle


class Publish(Message):
    """Publish the weights of `version`, which the learner holds."""

    version: Version


class JoinRanks(Message):
    """To a rank but 0: be rank `rank` of the learner, whose ranks meet at `address`."""

    rank: int
    address: str


class SaveCheckpoint(Message):
    """Write a checkpoint of the learner's version, while training continues, and delete all others
    except those of versions `keep`."""

    keep: tuple[Version, ...]


class ComputeReward(Message):
    """Decode responses to one prompt, call reward functions on them, and reply under `key`."""

    key: str
    """Names the responses in replies and in errors that users see."""
    prompt: str | list[dict[str, Any]]
    responses: list[list[int]]
    """Token ids of each; every function is called once, with all responses."""
    columns: dict[str, Any]  # of the prompt's row
    functions: tuple[int, ...]
    """Indices into the functions of `suites.suite.reward_sections`."""
    trainer_state: TrainerState
    observations: list[list[tuple[int, int]]] = []
    """With environments: the start and end, in tokens, of each observation in each response."""


class AskPolicy(Message):
    """To an instance: another call of an agent's response that it answers calls of. If it answers
    none any more, it passes this over: the response is routed again."""

    trajectory: TrajectoryId
    call: Continuation


class DropCall(Message):
    """To an instance: nobody waits for the answer to this call any more."""

    trajectory: TrajectoryId
    branch: int


class AskEnvironment(Message):
    """Request what `wants` says: the opening that follows the prompt, the answer to the last of
    `episode.turns` (at most `room` tokens), or the reward of the whole episode. An agent's program
    begins with the answer to an empty turn; `room` is then that of a prompt."""

    episode: Episode
    wants: Literal["opening", "answer", "reward"]
    room: int = 0


class AnswerCall(Message):
    """The policy's answer to an agent's call, a turn that ends at token `end` of the response."""

    key: str
    number: int
    tokens: list[int]
    logprobs: list[float]
    end: int
    reason: Literal["stop", "length"]


class TurnGrew(Message):
    """More tokens of the policy's answer to an agent's call that is streamed."""

    key: str
    number: int
    tokens: list[int]
    logprobs: list[float]


class CloseEpisodes(Message):
    """Close the episodes with these keys."""

    keys: list[str]


# -- to the controller -----------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a response from position `start` on, generated under `version` in `steps`
    iterations, in which `drafted` tokens were proposed and verified. Of an agent's response they
    are those of the turn that answers the call in `branch`."""

    trajectory: TrajectoryId
    start: int
    version: Version
    steps: int
    drafted: int
    tokens: list[int]
    logprobs: list[float]
    accepted: bytes = b""
    """With `run.token_details`: per token one byte, 1 if it was drafted, else 0."""
    branch: int = 0


class TokensGenerated(Message):
    """Tokens that were generated since the last such message."""

    parts: list[Part]


class CallEnded(Message):
    """The turn that answers an agent's call is over, and why."""

    trajectory: TrajectoryId
    branch: int
    reason: Literal["stop", "length"]


class RanksMeet(Message):
    """The learner's rank 0 waits for the others at `address` (host:port)."""

    address: str


class ResponseDetails(NamedTuple):
    """One response's details; see `learner/token_details.py`."""

    trajectory: TrajectoryId
    logprobs: bytes | None
    flags: bytes


class BatchDetails(Message):
    """With `run.token_details`, before `BatchTrained`: details of each response of the batch."""

    responses: list[ResponseDetails]


class Retraining(Message):
    """The learner of a resumed run trains on a stored batch again, which makes `version`."""

    version: Version
    last: Version  # the version at which such training ends


class BatchTrained(Message):
    """The learner has trained on batch `version`, in `seconds`."""

    version: Version
    metrics: dict[str, float]
    seconds: float


class CheckpointEnded(Message):
    """A checkpoint of `version` is complete in `path`, or could not be written (`error`)."""

    version: Version
    path: str
    error: str | None = None


class HistoryGrew(Message):
    """A node's index holds `num_tokens`. The code for drafting is compiled before the first one."""

    index: IndexHandle
    num_tokens: int


class RewardComputed(Message):
    """For each response its text, and its rewards by the names of the functions that applied."""

    key: str
    texts: list[str]
    components: list[dict[str, float]]
    last_turns: list[str] = []
    """If responses have turns: the text of each one's last turn."""
    noted: list[tuple[str, float]] = []
    """Names and values that functions passed to `log_metric`."""
    extra: dict[str, list[Any]] = {}
    """Columns that functions passed to `log_extra`: a value for each response."""


class NoReward(Message):
    """The responses have no reward: their functions failed with `error`, after all retries."""

    key: str
    texts: list[str]
    error: str


class EpisodeOpened(Message):
    """The text that `reset` returned, perhaps empty; see `data.prompts.opened`."""

    key: str
    opening: str


class TurnAnswered(Message):
    """The observation after turn `turn`, as token ids, or the reason why the episode has ended. Of
    an agent only the latter, and the turn is the controller's to say."""

    key: str
    turn: int
    answer: list[int] | FinishReason
    figures: TurnFigures


class CallMade(Message):
    """An agent's program asks the policy; its calls may be many at once, each with a number. The
    call adds `tokens` to what the response has up to `follows` (`store/branches.py`)."""

    key: str
    number: int
    tokens: list[int]
    follows: int
    until: Until
    figures: TurnFigures
    is_streamed: bool = False
    """Whether the program reads the answer while it is generated (`TurnGrew`)."""


class CallLeft(Message):
    """The program does not wait for the answer to a call any more. What it has read of one that is
    streamed is a turn."""

    key: str
    number: int


class EpisodeJudged(Message):
    """The environment's reward, by its name; empty if it gives none."""

    key: str
    rewards: dict[str, float]


class EpisodeFailed(Message):
    """A request to the environment failed, after all retries, with `error`. `is_lost`: an agent's
    program, through no fault of its own."""

    key: str
    turn: int
    error: str
    is_lost: bool = False


class Printed(Message):
    """The first line that user code has printed; it is in the worker's log."""

    line: str


class Alive(Message):
    """A heartbeat; see `entry.py`."""

    progress: int = 0


class Failed(Message):
    """The worker ends with `error`: a line for the user if `user_error`, else a traceback."""

    error: str
    user_error: bool


WAIT_SECONDS = 1.0
"""How often a worker counts progress while it waits for a message: waiting is not hanging."""

AnyMessage = Message | Envelope | Command | Event

_encoder = msgspec.msgpack.Encoder()
_frame = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw, msgspec.Raw])
_decoders = {
    kind.__name__: msgspec.msgpack.Decoder(kind)
    for kind in (*Message.__subclasses__(), *get_args(Command), *get_args(Event))
}
_data_decoders = {name: msgspec.msgpack.Decoder(kind) for name, kind in DATA.items()}


def encode(message: AnyMessage) -> bytes:
    """Return the message as bytes, with the name of its class."""
    what, data = message if isinstance(message, Envelope) else (message, None)
    return _encoder.encode((type(what).__name__, what, data))


def decode(message: bytes) -> Any:
    """Return what `encode` was given."""
    kind, encoded, data = _frame.decode(message)
    what = _decoders[kind].decode(encoded)
    return Envelope(what, _data_decoders[kind].decode(data)) if kind in DATA else what


def send(connection: Channel, message: AnyMessage) -> None:
    """Send one message; raises `BrokenPipeError` if the other end is gone."""
    connection.send_bytes(encode(message))


def receive(connection: Channel) -> Any:
    """Receive one message; raises `EOFError` if the other end is gone."""
    while not connection.poll(WAIT_SECONDS):
        progress.advance()
    return decode(connection.recv_bytes())
