"""Settings: precedence and refusals."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path

import pytest

from baton.config import load_config
from baton.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorConfig:
    host: str = "127.0.0.1"
    port: int = field(default=50051, metadata={"help": "port to listen on; 0 takes 100% any free one"})
    timeout_s: float = 2.5
    use_cache: bool = True
    edges: tuple[int, ...] = (128, 256)
    models: tuple[str, ...] = ()
    max_batch: int | None = None
    label: str | None = "blue"
    ratios: tuple[float, ...] = ()
    tls: bool | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is outside 0..65535", field="port")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: str
    port: int = 1


def load(*argv: str, **environ: str) -> DoorConfig:
    return load_config(DoorConfig, section="door", argv=argv, environ=environ)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "baton.toml"
    path.write_text(
        '[door]\nport = 1000\nhost = "file"\ntimeout_s = 3\nedges = [1, 2]\nuse_cache = false\n'
        "[router]\nanything = 1\n"
    )
    return path


def test_without_any_source_the_defaults_hold() -> None:
    assert load() == DoorConfig()


def test_flags_beat_environment_beats_file_beats_defaults(config_file: Path) -> None:
    config = load(
        "--port=3000", "--config", str(config_file), BATON_DOOR_PORT="2000", BATON_DOOR_HOST="environment"
    )
    assert (config.port, config.host, config.timeout_s, config.label) == (3000, "environment", 3.0, "blue")
    assert config.edges == (1, 2)
    assert config.use_cache is False


def test_the_environment_can_name_the_file(config_file: Path) -> None:
    assert load(BATON_CONFIG=str(config_file)).port == 1000


def test_the_flag_for_the_file_beats_the_variable(config_file: Path) -> None:
    assert load("--config", str(config_file), BATON_CONFIG="/does/not/exist").port == 1000


@pytest.mark.parametrize(
    ("argv", "name", "expected"),
    [
        (["--no-use-cache"], "use_cache", False),
        (["--use-cache"], "use_cache", True),
        (["--edges", "1,2,3"], "edges", (1, 2, 3)),
        (["--edges="], "edges", ()),
        (["--models", '["a,b", "c"]'], "models", ("a,b", "c")),
        (["--max-batch", "8"], "max_batch", 8),
        (["--unset-label"], "label", None),
        (["--host=-x=y"], "host", "-x=y"),
        (["--timeout-s", "1e3"], "timeout_s", 1000.0),
        (["--no-tls"], "tls", False),
        (["--port=1", "--port=2"], "port", 2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_flags(argv: list[str], name: str, expected: object) -> None:
    assert getattr(load(*argv), name) == expected


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("ON", True), ("0", False), ("no", False)])
def test_booleans_in_the_environment(text: str, expected: bool) -> None:
    assert load(BATON_DOOR_USE_CACHE=text).use_cache is expected


@pytest.mark.parametrize(
    ("argv", "environ", "key", "words"),
    [
        (["--port", "many"], {}, "port", ["flag --port", "'many'", "an integer"]),
        ([], {"BATON_DOOR_TIMEOUT_S": "nan"}, "timeout_s", ["BATON_DOOR_TIMEOUT_S", "a finite number"]),
        ([], {"BATON_DOOR_USE_CACHE": "maybe"}, "use_cache", ["BATON_DOOR_USE_CACHE", "true or false"]),
        ([], {"BATON_DOOR_EDGES": "1,,2"}, "edges", ["BATON_DOOR_EDGES", "a list of integers"]),
        ([], {"BATON_DOOR_EDGES": '["a"]'}, "edges", ["a list of integers"]),
        ([], {"BATON_DOOR_PROT": "1"}, "prot", ["BATON_DOOR_PROT", "unknown", "port"]),
        (["--prot=1"], {}, "prot", ["--prot", "unknown", "--port"]),
        (["--por=1"], {}, "por", ["unknown"]),
        (["--port"], {}, "argv", ["--port", "expected one argument"]),
        (["--port=70000"], {}, "port", ["0..65535", "flag --port"]),
        ([], {"BATON_DOOR_PORT": "-1"}, "port", ["0..65535", "environment variable BATON_DOOR_PORT"]),
    ],
)
def test_a_bad_setting_names_key_origin_and_what_is_allowed(
    argv: list[str], environ: dict[str, str], key: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*argv, **environ)
    assert caught.value.field == key
    assert [word for word in words if word not in caught.value.message] == []


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("[door]\nprot = 1\n", "prot", ["[door] prot", "unknown", "port"]),
        ('[door]\nport = "1"\n', "port", ["[door] port", "'1'", "an integer"]),
        ("[door]\nport = true\n", "port", ["True", "an integer"]),
        ("[door]\nedges = 3\n", "edges", ["a list of integers"]),
        ("[door]\ntimeout_s = inf\n", "timeout_s", ["a finite number"]),
        ("[door]\nport = 70000\n", "port", ["0..65535", "[door] port"]),
        ("port = 1\n", "port", ["outside a table", "[door]"]),
        ("[door\n", "config", ["cannot be read as TOML"]),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, key: str, words: list[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load("--config", str(path))
    assert caught.value.field == key
    assert [word for word in [*words, str(path)] if word not in caught.value.message] == []


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/does/not/exist"):
        load("--config", "/does/not/exist")


def test_a_required_setting_names_all_three_ways_to_give_it() -> None:
    with pytest.raises(ConfigError, match=r"--model, BATON_STORE_MODEL or model under \[store\]") as caught:
        load_config(ModelConfig, section="store", argv=[], environ={})
    assert caught.value.field == "model"


def test_variables_of_other_sections_do_not_matter() -> None:
    assert load(BATON_WINDOW_PORT="x", PATH="/bin") == DoorConfig()


def test_variables_that_kubernetes_sets_for_a_service_named_like_the_section_are_ignored() -> None:
    environ = {
        "BATON_DOOR_PORT": "tcp://10.0.0.1:50051",
        "BATON_DOOR_SERVICE_HOST": "10.0.0.1",
        "BATON_DOOR_SERVICE_PORT": "50051",
        "BATON_DOOR_SERVICE_PORT_GRPC": "50051",
        "BATON_DOOR_PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "BATON_DOOR_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    assert load(**environ) == DoorConfig()


def test_help_names_every_flag_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "port to listen on; 0 takes 100% any free one (default: 50051)" in text
    assert "--no-use-cache" in text


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        load().port = 1  # type: ignore[misc]


def test_a_field_of_another_type_is_a_defect_found_at_once() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class BadConfig:
        table: dict[str, int] = field(default_factory=dict)

    with pytest.raises(TypeError, match="dict"):
        load_config(BadConfig, section="bad", argv=[], environ={})


def test_a_misspelt_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("[clutser]\nport = 1\n")
    with pytest.raises(ConfigError, match=r"\[clutser\] is unknown; allowed: cluster") as error:
        load_config(DoorConfig, section="door", argv=["--config", str(file)], environ={})
    assert error.value.field == "clutser"
