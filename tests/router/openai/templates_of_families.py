"""Small templates in the forms of the families: what a model is shown of tools, calls, results and thoughts."""

LLAMA = """{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>' }}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ (call.arguments | tojson) ~ '}' }}
{%- else %}{{- message.content }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"""

_MISTRAL = """{{- '<s>' }}
{%- for tool in tools or [] %}{{- '[AVAILABLE_TOOLS]' ~ (tool | tojson) }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if message.tool_call_id is undefined or message.tool_call_id | length != 9 %}
{{- raise_exception('a call has an id of nine characters') }}{% endif %}
{{- '[TOOL_RESULTS]' ~ message.tool_call_id ~ message.content }}
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('a call has an id of nine characters') }}{% endif %}
CALL
{%- endfor %}{{- '</s>' }}
{%- else %}{{- '[INST]' ~ message.content ~ '[/INST]' }}{% endif %}
{%- endfor %}"""
MISTRAL = _MISTRAL.replace(
    "CALL\n",
    """{{- '[TOOL_CALLS][{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) }}
{{- ', "id": "' ~ call.id ~ '"}]' }}\n""",
)
MISTRAL_ARGS = _MISTRAL.replace(
    "CALL\n",
    "{{- '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ (call.function.arguments | tojson) }}\n",
)
MAGISTRAL = MISTRAL_ARGS + "{# [THINK] [/THINK] #}"

_CHATML = """{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
HERMES = _CHATML
QWEN_THINKING = _CHATML + "{%- if add_generation_prompt %}{{- '<think>\\n' }}{% endif %}"
R1 = (
    _CHATML.replace("message.content }}", "(message.content or '').split('</think>')[-1] }}")
    + "{%- if add_generation_prompt and opens %}{{- '<think>\\n' }}{% endif %}"
)
