"""Telemetry: passes and messages as spans of OpenTelemetry's, beside Megatron's own."""
