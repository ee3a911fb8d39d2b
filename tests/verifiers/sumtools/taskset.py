import verifiers.v1 as vf
from sumtools.server import Calculator


class SumTaskConfig(vf.TaskConfig):
    calculator: vf.ToolsetConfig = vf.ToolsetConfig()
    has_calculator: bool = False


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(config.calculator)] if config.has_calculator else []

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        if "raise" in (trace.last_reply or ""):
            raise ValueError("this is no sum")
        return float(len(trace.last_reply or "") < 10)


class SumConfig(vf.TasksetConfig):
    task: SumTaskConfig = SumTaskConfig()
    least: int = 2


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for a in range(self.config.least, self.config.least + 5):
            how = " Call calc_add." if self.config.task.has_calculator else ""
            data = SumData(prompt=f"What is {a} + 40?{how}", answer=a + 40)
            yield SumTask(data, self.config.task)
