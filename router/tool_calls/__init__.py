"""Tool calls in answers: how a model writes them, how to read them from its text, how to force them.

A door uses it so:

- `text.tool_format` (router/text.py) is the model's `ToolFormat`, or None where the way its template writes
  calls is not known here: tools can then be shown to the model, but its calls stay text.
- `read_tools(chat.tools)` (router/tools.py) checks the definitions, as the request's reader does once more.
- `tool_format.grammar(tools, function="", parallel=True)` is the Grammar of an answer that is a call of
  `function`, or of any of the tools: for a tool_choice that is "required" or names a function. Under "auto"
  an answer is free text, and arguments are not checked against their schema; under "none" give the template
  no tools. The compiler's refusal of a schema names the field "grammar"; it is the tools' fault.
- `tool_format.parser(names, rng, parallel=True)` is a ToolCallParser for one answer: `push(text)` and, at its
  end, `flush()` return a list of ContentDelta and CallDelta. A call comes as two: first its index, id and
  name with arguments "", then the whole of its arguments. Only calls of functions in `names` are calls;
  everything else stays text.

Nothing needs to be done to keep markers in the text: where a chat has tools, the special tokens that mark
calls are left in the text of its answers, all others are left out as asked.
"""

from router.tool_calls.deltas import CallDelta, ContentDelta
from router.tool_calls.parser import ToolCallParser
from router.tool_calls.tool_format import ToolFormat, tool_format

__all__ = ["CallDelta", "ContentDelta", "ToolCallParser", "ToolFormat", "tool_format"]
