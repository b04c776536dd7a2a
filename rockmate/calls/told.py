"""What a module has told its user: each thing once, however often the warning filters would have it."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterator

from rkgb.process.turns import warnings_collected
from rockmate.errors import ReplanWarning
from rockmate.runtime.double_backward import frames_to_the_user

_MOST_TOLD = 256


class Told:
    """The texts that were told."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, None] = OrderedDict()

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """What is warned of within this context comes once for all such contexts."""
        with warnings_collected() as caught:
            yield
        for told in caught:
            self.tell(str(told.message), told.category)

    def tell(self, text: str, category: type[Warning] = ReplanWarning) -> None:
        """Warn of it, if it is new."""
        if text not in self._texts:
            self._texts[text] = None
            if len(self._texts) > _MOST_TOLD:
                self._texts.popitem(last=False)
            self.warn(category(text))

    def warn(self, warning: Warning) -> None:
        """Warn, at the line of the user's that called."""
        warnings.warn(warning, stacklevel=frames_to_the_user())
