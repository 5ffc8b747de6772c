"""How tiles are copied between memories."""
