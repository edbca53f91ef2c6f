"""The parts of methods, and all that an author of one imports: `from fedvlm.parts import Adapter, Params, Task`.

Names stay here when the modules behind them move. Each is imported when it is first used, so that `import fedvlm.parts`
does not import torch. Engines and sources of data are rooms above this one: the table names modules in words, and only the
use of a name, by code that is none of this package's, imports one. Inside the package nothing but the code of users does.
"""

from typing import TYPE_CHECKING

from fedvlm.system.lazy import lazy

if TYPE_CHECKING:
    from fedvlm.backbones.base import Backbone as Backbone
    from fedvlm.core.adapter import Adapter as Adapter
    from fedvlm.core.adapter import HasClassVectors as HasClassVectors
    from fedvlm.core.adapter import HasDetectionScores as HasDetectionScores
    from fedvlm.core.adapter import HasDiagnostics as HasDiagnostics
    from fedvlm.core.adapter import HasGradient as HasGradient
    from fedvlm.core.adapter import HasLinearForm as HasLinearForm
    from fedvlm.core.adapter import HasLinearHead as HasLinearHead
    from fedvlm.core.adapter import HasRawEmbedding as HasRawEmbedding
    from fedvlm.core.adapter import HasSharedTwin as HasSharedTwin
    from fedvlm.core.adapter import HasTowers as HasTowers
    from fedvlm.core.adapter import Limits as Limits
    from fedvlm.core.adapter import NeedsNouns as NeedsNouns
    from fedvlm.core.adapter import Task as Task
    from fedvlm.core.adapter import initial_classifier as initial_classifier
    from fedvlm.core.cohort import Cohort as Cohort
    from fedvlm.core.data import Batch as Batch
    from fedvlm.core.data import Data as Data
    from fedvlm.core.descent import Gradients as Gradients
    from fedvlm.core.descent import by_autograd as by_autograd
    from fedvlm.core.descent import optimise as optimise
    from fedvlm.core.descent import with_proximal_term as with_proximal_term
    from fedvlm.core.local import Local as Local
    from fedvlm.core.local import Trained as Trained
    from fedvlm.core.local import anchor_of as anchor_of
    from fedvlm.core.merge import Merge as Merge
    from fedvlm.core.metric import Additive as Additive
    from fedvlm.core.metric import ClientView as ClientView
    from fedvlm.core.metric import Metric as Metric
    from fedvlm.core.metric import PerClient as PerClient
    from fedvlm.core.metric import one_hot_statistic as one_hot_statistic
    from fedvlm.core.model import Model as Model
    from fedvlm.core.ranges import Count as Count
    from fedvlm.core.ranges import NotNegative as NotNegative
    from fedvlm.core.ranges import Positive as Positive
    from fedvlm.core.ranges import PositiveShare as PositiveShare
    from fedvlm.core.ranges import Range as Range
    from fedvlm.core.ranges import Share as Share
    from fedvlm.core.ranges import Whole as Whole
    from fedvlm.core.schema import Field as Field
    from fedvlm.core.schema import Fields as Fields
    from fedvlm.core.seeds import generator as generator
    from fedvlm.core.state import Message as Message
    from fedvlm.core.state import Params as Params
    from fedvlm.core.state import Reply as Reply
    from fedvlm.core.state import State as State
    from fedvlm.core.state import with_client_axis as with_client_axis
    from fedvlm.core.tasks import CLASSIFICATION as CLASSIFICATION
    from fedvlm.core.tasks import NEXT_CHARACTER as NEXT_CHARACTER
    from fedvlm.core.tasks import SEGMENTATION as SEGMENTATION
    from fedvlm.core.tasks import TaskType as TaskType
    from fedvlm.data.format import Format as Format
    from fedvlm.data.format import Options as Options
    from fedvlm.data.images import BadImage as BadImage
    from fedvlm.data.source import Item as Item
    from fedvlm.data.source import Source as Source
    from fedvlm.engines.base import Engine as Engine
    from fedvlm.engines.base import Job as Job
    from fedvlm.engines.serial import Serial as Serial
    from fedvlm.engines.stacked import Stacked as Stacked
    from fedvlm.errors import FedvlmError as FedvlmError
    from fedvlm.parts.adapters.head import Head as Head
    from fedvlm.parts.local.means import Means as Means
    from fedvlm.parts.merge.mean import Mean as Mean
    from fedvlm.parts.registry import find as find

_HOMES = {
    "fedvlm.backbones.base": ("Backbone",),
    "fedvlm.core.adapter": (
        *("Adapter", "Limits", "Task", "initial_classifier"),
        *("HasClassVectors", "HasDetectionScores", "HasDiagnostics", "HasGradient", "HasLinearForm", "HasLinearHead"),
        *("HasRawEmbedding", "HasSharedTwin", "HasTowers", "NeedsNouns"),
    ),
    "fedvlm.core.cohort": ("Cohort",),
    "fedvlm.core.data": ("Batch", "Data"),
    "fedvlm.core.descent": ("Gradients", "by_autograd", "optimise", "with_proximal_term"),
    "fedvlm.core.local": ("Local", "Trained", "anchor_of"),
    "fedvlm.core.merge": ("Merge",),
    "fedvlm.core.metric": ("Additive", "ClientView", "Metric", "PerClient", "one_hot_statistic"),
    "fedvlm.core.model": ("Model",),
    "fedvlm.core.ranges": ("Count", "NotNegative", "Positive", "PositiveShare", "Range", "Share", "Whole"),
    "fedvlm.core.schema": ("Field", "Fields"),
    "fedvlm.core.seeds": ("generator",),
    "fedvlm.core.state": ("Message", "Params", "Reply", "State", "with_client_axis"),
    "fedvlm.core.tasks": ("CLASSIFICATION", "NEXT_CHARACTER", "SEGMENTATION", "TaskType"),
    "fedvlm.data.format": ("Format", "Options"),
    "fedvlm.data.images": ("BadImage",),
    "fedvlm.data.source": ("Item", "Source"),
    "fedvlm.engines.base": ("Engine", "Job"),
    "fedvlm.engines.serial": ("Serial",),
    "fedvlm.engines.stacked": ("Stacked",),
    "fedvlm.errors": ("FedvlmError",),
    "fedvlm.parts.adapters.head": ("Head",),
    "fedvlm.parts.local.means": ("Means",),
    "fedvlm.parts.merge.mean": ("Mean",),
    "fedvlm.parts.registry": ("find",),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)
__getattr__, __dir__ = lazy(__name__, _HOMES)
