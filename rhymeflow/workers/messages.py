"""What the controller and its workers say to each other: typed, msgpack, no pickle.

Commands and events of the coordinator are sent as they are, some with data in an envelope
(`Carried`); what the coordinator does not know is a `Message`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, dataclass_transform, get_args

import msgspec

from rhymeflow.core.commands import Command
from rhymeflow.core.events import Event
from rhymeflow.core.types import FinishReason, SuiteName, TrajectoryId, Version
from rhymeflow.environments.episode import Episode, TurnFigures
from rhymeflow.histospec.draft import DraftStats, IndexHandle
from rhymeflow.reward.messages import TrainerState
from rhymeflow.utils import progress
from rhymeflow.weights.base import WeightHandle
from rhymeflow.workers.channel import Channel


@dataclass_transform(frozen_default=True)
class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages that are neither commands nor events."""


class Carried(NamedTuple):
    """A command or an event, and the data that comes with it: see `DATA`."""

    what: Command | Event
    data: Any


class Continuation(msgspec.Struct, frozen=True, array_like=True):
    """With `Route`: a response to prompt row `prompt` in `epoch`, to be continued after `tokens`,
    of the policy and its environment. The policy's turn `turn`, from 1, began after `turn_start` of
    them. The command of a suite's response has number 0."""

    prompt: int
    epoch: int
    prompt_ids: list[int]
    tokens: list[int]
    turn: int = 1
    turn_start: int = 0
    suite: SuiteName = ""


class Status(msgspec.Struct, frozen=True, array_like=True):
    """With `Snapshot`: how the instance is. Totals count from its start."""

    running: int
    waiting: int
    tokens: int
    busy_seconds: float
    drafts: DraftStats


class LoadedModel(msgspec.Struct, frozen=True, array_like=True):
    """With `LearnerReady`: the model that is loaded, and where its weights are."""

    handle: WeightHandle
    device: str
    dtype: str
    """Compute precision, torch's name."""
    max_length: int
    """Tokens that a prompt and the response to it can have together."""
    checkpoint_bytes: int
    """What a checkpoint takes on the disk."""
    retrain_seconds: float = 0.0
    """That training the batches since the last checkpoint again took."""
    num_parameters: int = 0
    num_trained: int = 0
    """Of these, those that are not frozen."""
    damaged: list[tuple[Version, str]] = []
    """Checkpoints that were passed over, and what is wrong with each."""


class Publication(msgspec.Struct, frozen=True, array_like=True):
    """With `VersionPublished`: how long publishing took, and what the weight store says of it."""

    seconds: float
    metrics: dict[str, float] = {}


DATA: dict[str, Any] = {
    "Route": Continuation,
    "Pulled": float,  # seconds that it took
    "Snapshot": Status,
    "LearnerReady": LoadedModel,
    "VersionPublished": Publication,
}
"""What comes with the commands and events of these names; with others there is nothing."""


# -- from the controller --------------------------------------------------------------------------


class Shutdown(Message):
    """End."""


class ConnectWeights(Message):
    """Where the weights are. The instance takes them and joins."""

    handle: WeightHandle


class UseDrafter(Message):
    """Draft from this index from now on."""

    index: IndexHandle


class Publish(Message):
    """Publish the weights of `version`, which the learner holds."""

    version: Version


class JoinRanks(Message):
    """To a rank but 0: be rank `rank` of the learner, whose ranks meet at `address`."""

    rank: int
    address: str


class SaveCheckpoint(Message):
    """Write a checkpoint of the version that the learner holds, while training continues, and
    delete all others but those of versions `keep`."""

    keep: tuple[Version, ...]


class ComputeReward(Message):
    """Make text of responses to one prompt, call reward functions on them, answer under `key`."""

    key: str
    """Names the responses in answers and in errors that users see."""
    prompt: str | list[dict[str, Any]]
    responses: list[list[int]]
    """Tokens; every function is called once, with all of them."""
    columns: dict[str, Any]
    """Of the prompt's row in the data."""
    functions: tuple[int, ...]
    """By their places in `suites.suite.reward_sections`."""
    trainer_state: TrainerState
    turns: list[list[tuple[int, int]]] = []
    """With environments, for each response and each answer in it: the tokens before and with it."""


class AskEnvironment(Message):
    """Asks for what follows the prompt, before the first turn; for an answer to the last of
    `episode.turns`, of `room` tokens at most; or, in the end, for the reward."""

    episode: Episode
    wants: Literal["opening", "answer", "reward"]
    room: int = 0


class CloseEpisodes(Message):
    """Close these episodes, by key."""

    keys: list[str]


# -- to the controller -----------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a response from position `start` on, generated under `version` in `steps`
    iterations, in which `drafted` tokens were proposed and verified."""

    trajectory: TrajectoryId
    start: int
    version: Version
    steps: int
    drafted: int
    tokens: list[int]
    logprobs: list[float]
    accepted: bytes = b""
    """With `run.token_details`: for each token 1 if it was drafted, else 0."""


class TokensGenerated(Message):
    """What was generated since the last such message."""

    parts: list[Part]


class RanksMeet(Message):
    """The learner's rank 0 waits for the others at `address` (host:port)."""

    address: str


class ResponseDetails(NamedTuple):
    """Of one response: see `learner/token_details.py`."""

    trajectory: TrajectoryId
    logprobs: bytes | None
    flags: bytes


class BatchDetails(Message):
    """With `run.token_details`, before `BatchTrained`: each response of the batch once."""

    responses: list[ResponseDetails]


class Retraining(Message):
    """The learner of a resumed run trains on a stored batch, to make `version` again."""

    version: Version
    last: Version
    """Where it stops."""


class BatchTrained(Message):
    """Batch `version` is trained on, which took so many seconds."""

    version: Version
    metrics: dict[str, float]
    seconds: float


class CheckpointEnded(Message):
    """A checkpoint of `version` lies in `path`, or could not be written because of `error`."""

    version: Version
    path: str
    error: str | None = None


class HistoryGrew(Message):
    """The index, which has so many tokens; what drafting runs is compiled."""

    index: IndexHandle
    num_tokens: int


class RewardComputed(Message):
    """For each response its text, and rewards by name of the functions that applied."""

    key: str
    texts: list[str]
    components: list[dict[str, float]]
    last_turns: list[str] = []
    """Where responses have turns, the text of each one's last."""
    noted: list[tuple[str, float]] = []
    """Numbers that functions want logged, by the metric's name."""
    extra: dict[str, list[Any]] = {}
    """Columns that functions want kept beside the responses."""


class NoReward(Message):
    """No reward could be had for the responses, after all retries; `error` says why."""

    key: str
    texts: list[str]
    error: str


class EpisodeOpened(Message):
    """What `reset` returned, to be put after the prompt by `data.prompts.opened`; often nothing."""

    key: str
    opening: str


class TurnAnswered(Message):
    """The answer to turn `turn`, in tokens, or why the episode has ended."""

    key: str
    turn: int
    answer: list[int] | FinishReason
    figures: TurnFigures


class EpisodeJudged(Message):
    """The environment's reward by its name; empty where it has none that applies."""

    key: str
    rewards: dict[str, float]


class EpisodeFailed(Message):
    """The environment could not be had, asked or judged, after all retries; `error` says why."""

    key: str
    turn: int
    error: str


class Alive(Message):
    """A sign of life: see `entry.py`."""

    progress: int = 0


class Failed(Message):
    """The worker ends: `user_error` is a line for the user, else `error` is a traceback."""

    error: str
    user_error: bool


WAIT_SECONDS = 1.0
"""How often a worker that waits for a message says that it is not stuck."""

Sent = Message | Carried | Command | Event
"""What can be sent."""

_encoder = msgspec.msgpack.Encoder()
_frame = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw, msgspec.Raw])
_decoders = {
    kind.__name__: msgspec.msgpack.Decoder(kind)
    for kind in (*Message.__subclasses__(), *get_args(Command), *get_args(Event))
}
_data_decoders = {name: msgspec.msgpack.Decoder(kind) for name, kind in DATA.items()}


def encode(message: Sent) -> bytes:
    """Return the message as `decode` reads it: by its class's name."""
    what, data = message if isinstance(message, Carried) else (message, None)
    return _encoder.encode((type(what).__name__, what, data))


def decode(message: bytes) -> Any:
    """Return what `encode` was given."""
    kind, encoded, data = _frame.decode(message)
    what = _decoders[kind].decode(encoded)
    return Carried(what, _data_decoders[kind].decode(data)) if kind in DATA else what


def send(connection: Channel, message: Sent) -> None:
    """Send one message; raises `BrokenPipeError` if the other end is gone."""
    connection.send_bytes(encode(message))


def receive(connection: Channel) -> Any:
    """Receive one message; raises `EOFError` if the other end is gone."""
    while not connection.poll(WAIT_SECONDS):
        progress.advance()
    return decode(connection.recv_bytes())
