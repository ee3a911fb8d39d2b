from tests.learner.conftest import _one_thread as _one_thread
