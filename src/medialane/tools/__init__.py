"""Programs beside the server, which import it and are not imported by it."""
