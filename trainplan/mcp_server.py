"""Let assistants ask what fits, by the Model Context Protocol over standard input and output. It
needs `pip install 'trainplan[mcp]'`."""

import functools
import inspect
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

import trainplan

PARAMETERS = inspect.signature(trainplan.plan).parameters


class Server(MCPServer):
    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        """Refuse arguments that the library would drop."""
        if unknown := arguments.keys() - PARAMETERS:
            raise ToolError(f"{min(unknown)} is no argument. Use {', '.join(PARAMETERS)}.")
        return await super().call_tool(name, arguments, context)


server = Server("trainplan")


@server.tool()
@functools.wraps(trainplan.plan)
def plan(*args: Any, **kwargs: Any) -> dict[str, Any]:
    try:
        document = trainplan.plan(*args, **kwargs)
    except trainplan.UserError as error:
        raise ToolError(str(error)) from None  # the assistant sees no text of other errors
    document.pop("layouts", None)  # hundreds, of which `picks` has the best
    return document


def main() -> None:
    """Answer until the assistant closes standard input."""
    server.run()


if __name__ == "__main__":
    main()
