"""The serving core: settings, plugin host, scheduler, engine, model and the HTTP application."""
