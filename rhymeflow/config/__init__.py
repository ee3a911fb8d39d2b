"""The configuration of a run: a section a file, each field documented where it stands.

Importing it loads neither torch nor YAML: `load` reads files, `fields` says what is wrong with one.
"""

from rhymeflow.config.cluster import ClusterConfig
from rhymeflow.config.config import Config
from rhymeflow.config.data import DataConfig
from rhymeflow.config.drafting import DraftingConfig
from rhymeflow.config.environment import EnvironmentClass, EnvironmentConfig
from rhymeflow.config.eval import EvalConfig, EvalSuite
from rhymeflow.config.learner import LearnerConfig
from rhymeflow.config.model import ModelConfig
from rhymeflow.config.ray import RayConfig
from rhymeflow.config.reward import RewardConfig, RewardFunction
from rhymeflow.config.rollout import RolloutConfig
from rhymeflow.config.run import RunConfig
from rhymeflow.config.schedule import ScheduleConfig
from rhymeflow.config.section import Section
from rhymeflow.config.sft import SftConfig
from rhymeflow.config.simulation import FaultsConfig, SimulationConfig, WorkloadConfig
from rhymeflow.config.weights import WeightsConfig

__all__ = [
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DraftingConfig",
    "EnvironmentClass",
    "EnvironmentConfig",
    "EvalConfig",
    "EvalSuite",
    "FaultsConfig",
    "LearnerConfig",
    "ModelConfig",
    "RayConfig",
    "RewardConfig",
    "RewardFunction",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "Section",
    "SftConfig",
    "SimulationConfig",
    "WeightsConfig",
    "WorkloadConfig",
]
