"""How the runtime gets into NeMo."""
